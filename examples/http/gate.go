// Store, follow and work on records over HTTP, with Go's standard library; each goes on when the gate is restarted.
//
// usage: go run gate.go store ROUTE | follow ROUTE FILE | work ROUTE GROUP
//
// store takes lines from stdin. follow prints records, and keeps in FILE which was the last. work prints records that it
// gets as one worker of a group, and acknowledges them; curl -X PUT --json '{"sequence": "earliest"}' with the path
// /v1/routes/ROUTE/cursors/GROUP makes the group. WALD_GATE is the address, WALD_TOKEN a token if there are any.
package main

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	mathrand "math/rand"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

const linesMax, silence = 100, 60 * time.Second

var (
	gate   = "http://127.0.0.1:7700"
	pauses = []float64{0.1, 0.2, 0.5, 1, 2, 5} // seconds
	passes = map[int]bool{408: true, 409: true, 423: true, 429: true, 503: true} // 423: another gate has the group
)

// Record is what is asked of one here; in JSON, []byte is base64.
type Record struct {
	Sequence uint64 `json:"sequence"`
	Value    string `json:"value"`
	Bytes    []byte `json:"value_base64"`
}

func (record Record) show() {
	os.Stdout.Write(append(append([]byte(record.Value), record.Bytes...), '\n'))
}

func main() {
	if address := os.Getenv("WALD_GATE"); address != "" {
		gate = address
	}
	words := append(os.Args[1:], "", "", "")
	switch {
	case words[0] == "store" && len(os.Args) == 3:
		store(words[1])
	case words[0] == "follow" && len(os.Args) == 4:
		follow(words[1], words[2])
	case words[0] == "work" && len(os.Args) == 4:
		work(words[1], words[2])
	default:
		fail("usage: go run gate.go store ROUTE | follow ROUTE FILE | work ROUTE GROUP")
	}
}

// ask asks until take has taken an answer; what does not pass ends the program. Without a byte for a minute it asks again.
func ask(method, path string, body []byte, headers map[string]string, take func(io.Reader) error) {
	for tried := 0; ; tried++ {
		pause := pauses[min(tried, len(pauses)-1)]
		if err := try(method, path, body, headers, take, &pause); err == nil {
			return
		} else if strings.Contains(err.Error(), "x509: ") {
			fail(err.Error()) // SSL_CERT_FILE names one
		} else {
			fmt.Fprintln(os.Stderr, "trying again:", err)
		}
		time.Sleep(time.Duration(pause * (1 + mathrand.Float64()/2) * float64(time.Second)))
	}
}

func try(method, path string, body []byte, headers map[string]string, take func(io.Reader) error, pause *float64) error {
	request, err := http.NewRequest(method, gate+path, bytes.NewReader(body))
	if err != nil {
		fail(err)
	}
	for name, value := range headers {
		request.Header.Set(name, value)
	}
	if token := os.Getenv("WALD_TOKEN"); token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	silent := make(chan struct{})
	request.Cancel = silent
	timer := time.AfterFunc(silence, func() { close(silent) })
	defer timer.Stop()
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode == http.StatusOK {
		return take(awake{answer.Body, timer})
	}
	text, _ := io.ReadAll(answer.Body)
	after, err := strconv.ParseFloat(answer.Header.Get("Retry-After"), 64)
	if err != nil || !passes[answer.StatusCode] {
		fail(answer.Status, string(text))
	}
	*pause = after
	return fmt.Errorf("%s: %s", answer.Status, text)
}

// awake puts the end of an answer off with each byte that comes.
type awake struct {
	io.Reader
	timer *time.Timer
}

func (reader awake) Read(buffer []byte) (int, error) {
	count, err := reader.Reader.Read(buffer)
	reader.timer.Reset(silence)
	return count, err
}

// store sends a hundred lines in a request; its key makes it safe to send it again.
func store(route string) {
	lines := bufio.NewReader(os.Stdin)
	for atEnd := false; !atEnd; {
		var body []byte
		for number := 0; number < linesMax && !atEnd; number++ {
			line, err := lines.ReadBytes('\n')
			body, atEnd = append(body, line...), err != nil
		}
		if len(body) == 0 {
			return
		}
		key := make([]byte, 16)
		rand.Read(key)
		headers := map[string]string{"Content-Type": "text/plain", "Idempotency-Key": fmt.Sprintf("%x", key)}
		var stored struct{ First, Last uint64 }
		ask("POST", "/v1/routes/"+route+"/records", body, headers, into(&stored))
		fmt.Printf("stored %d to %d\n", stored.First, stored.Last)
	}
}

// follow reads Server-Sent Events; the id of the last one says where to go on.
func follow(route, file string) {
	for {
		headers := map[string]string{"Accept": "text/event-stream"}
		if last, err := os.ReadFile(file); err == nil {
			headers["Last-Event-ID"] = string(last)
		}
		ask("GET", "/v1/routes/"+route+"/records", nil, headers, func(events io.Reader) error {
			lines := bufio.NewReader(events)
			for {
				line, err := lines.ReadString('\n')
				if err != nil {
					return nil // go on behind the last one
				}
				if !strings.HasPrefix(line, "data: ") {
					continue
				}
				var record Record
				if err := json.Unmarshal([]byte(line[len("data: "):]), &record); err != nil {
					fail(err)
				}
				record.show()
				keep(file, record.Sequence)
			}
		})
		time.Sleep(100 * time.Millisecond)
	}
}

// keep replaces the file as a whole, so that it is never half written.
func keep(file string, sequence uint64) {
	err := os.WriteFile(file+".new", []byte(strconv.FormatUint(sequence, 10)), 0o666)
	if err == nil {
		err = os.Rename(file+".new", file)
	}
	if err != nil {
		fail(err)
	}
}

// work gets a record again if it was not acknowledged in time, or if the gate was restarted before: at least once.
func work(route, group string) {
	worker := fmt.Sprintf("example-%d", os.Getpid())
	post := func(verb string, fields map[string]any, answer any) {
		fields["worker"] = worker
		body, _ := json.Marshal(fields)
		headers := map[string]string{"Content-Type": "application/json"}
		ask("POST", "/v1/routes/"+route+"/groups/"+group+"/"+verb, body, headers, into(answer))
	}
	for {
		var leased struct{ Records []Record }
		post("lease", map[string]any{"max_records": 100, "lease_for": 30, "wait": 20}, &leased)
		sequences := []uint64{}
		for _, record := range leased.Records {
			record.show()
			sequences = append(sequences, record.Sequence)
		}
		if len(sequences) == 0 {
			continue
		}
		var settled struct{ Refused []json.RawMessage }
		post("ack", map[string]any{"sequences": sequences}, &settled)
		for _, each := range settled.Refused {
			fmt.Fprintf(os.Stderr, "comes again, perhaps: %s\n", each)
		}
	}
}

func into(answer any) func(io.Reader) error {
	return func(body io.Reader) error { return json.NewDecoder(body).Decode(answer) }
}

func min(one, other int) int {
	if one < other {
		return one
	}
	return other
}

func fail(why ...any) {
	fmt.Fprintln(os.Stderr, why...)
	os.Exit(1)
}
