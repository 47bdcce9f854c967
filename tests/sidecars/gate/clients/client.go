// Print the answers of a gate to the Go client that openapi-generator generates.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"

	client "generated/openapi_client"
)

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func problem(answer *http.Response, err error) []any {
	var failed *client.GenericOpenAPIError
	if !errors.As(err, &failed) {
		panic(err)
	}
	return []any{answer.StatusCode, failed.Model().(client.Problem).Code}
}

func main() {
	configuration := client.NewConfiguration()
	configuration.Servers = client.ServerConfigurations{{URL: os.Args[1]}}
	api := client.NewAPIClient(configuration).DefaultAPI
	ctx := context.WithValue(context.Background(), client.ContextAccessToken, os.Args[2])

	one, two := client.NewNewRecord(), client.NewNewRecord()
	one.SetValue("one")
	one.SetKey("ann")
	two.SetValue([]int{2})
	two.SetHeaders(map[string]string{"a": "b"})
	stored, _, err := api.Append(ctx, "orders").NewRecord([]client.NewRecord{*one, *two}).Execute()
	must(err)
	found, _, err := api.Records(ctx, "orders").From("earliest").To("2").Execute()
	must(err)
	first := int64(1)
	position := client.NewCursorPosition(client.CursorPositionSequence{Int64: &first})
	_, _, err = api.SetCursor(ctx, "orders", "packing").CursorPosition(*position).Execute()
	must(err)
	cursor, _, err := api.Cursor(ctx, "orders", "packing").Execute()
	must(err)
	lease := client.NewLease("ann")
	lease.SetMaxRecords(5)
	leased, _, err := api.Lease(ctx, "orders", "packing").Lease(*lease).Execute()
	must(err)
	listed, _, err := api.Pending(ctx, "orders", "packing").Execute()
	must(err)
	settled, _, err := api.Ack(ctx, "orders", "packing").Ack(*client.NewAck("ann", []int64{1, 2, 9})).Execute()
	must(err)
	_, absent, missing := api.Records(ctx, "orders").From("99").Execute()
	_, denied, forbidden := api.Append(ctx, "secret").NewRecord([]client.NewRecord{*one}).Execute()

	records, leases, pending, refused, times := [][]any{}, [][]any{}, [][]any{}, []int64{}, true
	for _, each := range found {
		records = append(records, []any{each.Sequence, each.GetValue(), each.Key.Get()})
		times = times && each.AppendTimeNs > 1e18
	}
	for _, each := range leased.Records {
		leases = append(leases, []any{each.Sequence, each.Tries, each.GetValue()})
	}
	for _, each := range listed {
		pending = append(pending, []any{each.Out.Kind, each.Out.Worker})
	}
	for _, each := range settled.Refused {
		refused = append(refused, each.Sequence)
	}
	must(json.NewEncoder(os.Stdout).Encode(map[string]any{
		"stored":   []int64{stored.First, stored.Last, stored.Count},
		"records":  records,
		"times":    times,
		"cursor":   []any{cursor.Sequence, cursor.State},
		"leased":   leases,
		"pending":  pending,
		"refused":  refused,
		"problems": [][]any{problem(absent, missing), problem(denied, forbidden)},
	}))
}
