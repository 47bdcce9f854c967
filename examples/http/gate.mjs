// Store, follow and work on records over HTTP, with Node's fetch; each goes on when the gate is restarted.
//
// usage: node gate.mjs store ROUTE | follow ROUTE FILE | work ROUTE GROUP
//
// store takes lines from stdin. follow prints records, and keeps in FILE which was the last. work prints records that it
// gets as one worker of a group, and acknowledges them; curl -X PUT --json '{"sequence": "earliest"}' with the path
// /v1/routes/ROUTE/cursors/GROUP makes the group. WALD_GATE is the address, WALD_TOKEN a token if there are any.

import { randomUUID } from "node:crypto";
import { existsSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";

const GATE = process.env.WALD_GATE ?? "http://127.0.0.1:7700";
const AUTHORIZATION = process.env.WALD_TOKEN ? { Authorization: `Bearer ${process.env.WALD_TOKEN}` } : {};
const PASSES = new Set([408, 409, 423, 429, 503]); // 409: the same is under way; 423: another gate has the group
const PAUSES = [0.1, 0.2, 0.5, 1, 2, 5]; // seconds

class Refused extends Error {}

// Ask until `take` has taken an answer; what does not pass is an error. Without a byte for a minute, it asks again.
async function ask(method, path, { headers, body, take }) {
  for (let tried = 0; ; tried++) {
    const silent = new AbortController();
    const timer = setTimeout(() => silent.abort(), 60_000);
    let pause = PAUSES[Math.min(tried, PAUSES.length - 1)];
    try {
      const answer = await fetch(GATE + path, {
        method, body, headers: { ...AUTHORIZATION, ...headers }, signal: silent.signal,
      });
      if (answer.ok) return await take(answer, () => timer.refresh());
      const text = await answer.text();
      const after = answer.headers.get("Retry-After");
      if (!PASSES.has(answer.status) || after === null) throw new Refused(`${answer.status}: ${text}`);
      pause = Number(after);
    } catch (error) {
      if (error instanceof Refused || /CERT|SIGNED/.test(error.cause?.code)) throw error; // NODE_EXTRA_CA_CERTS names one
      console.error(`trying again: ${error.cause ?? error}`);
    } finally {
      clearTimeout(timer);
    }
    await sleep(pause * 1000 * (1 + Math.random() / 2));
  }
}

const json = (answer) => answer.json();

// A hundred lines in a request; its key makes it safe to send it again.
async function store(route) {
  const send = async (lines) => {
    const headers = { "Content-Type": "text/plain", "Idempotency-Key": randomUUID() };
    const body = lines.map((line) => `${line}\n`).join("");
    const { first, last } = await ask("POST", `/v1/routes/${route}/records`, { headers, body, take: json });
    console.log(`stored ${first} to ${last}`);
  };
  let lines = [];
  for await (const line of createInterface({ input: process.stdin, crlfDelay: Infinity })) {
    lines.push(line);
    if (lines.length === 100) {
      await send(lines);
      lines = [];
    }
  }
  if (lines.length) await send(lines);
}

// Server-Sent Events; the id of the last one says where to go on.
async function follow(route, file) {
  for (;;) {
    const headers = { Accept: "text/event-stream" };
    if (existsSync(file)) headers["Last-Event-ID"] = readFileSync(file, "utf8");
    const take = async (answer, alive) => {
      let rest = "";
      for await (const chunk of answer.body.pipeThrough(new TextDecoderStream())) {
        alive();
        const lines = (rest + chunk).split("\n");
        rest = lines.pop();
        for (const line of lines.filter((each) => each.startsWith("data: "))) {
          const record = JSON.parse(line.slice("data: ".length));
          show(record);
          writeFileSync(`${file}.new`, String(record.sequence));
          renameSync(`${file}.new`, file); // as a whole, so that it is never half written
        }
      }
    };
    try {
      await ask("GET", `/v1/routes/${route}/records`, {
        headers,
        take: (answer, alive) => take(answer, alive).catch((error) => console.error(`going on: ${error}`)),
      });
    } finally {
      await sleep(100);
    }
  }
}

// A record comes again if it was not acknowledged in time, or if the gate was restarted before: at least once.
async function work(route, group) {
  const path = `/v1/routes/${route}/groups/${group}`;
  const worker = `example-${process.pid}`;
  const post = (verb, fields) =>
    ask("POST", `${path}/${verb}`, {
      headers: { "Content-Type": "application/json" }, body: JSON.stringify({ worker, ...fields }), take: json,
    });
  for (;;) {
    const { records } = await post("lease", { max_records: 100, lease_for: 30, wait: 20 });
    records.forEach(show);
    if (!records.length) continue;
    const { refused } = await post("ack", { sequences: records.map((record) => record.sequence) });
    for (const each of refused) console.error("comes again, perhaps:", each);
  }
}

// Print the value, which is in base64 if it is no UTF-8.
function show(record) {
  const value = record.value === undefined ? Buffer.from(record.value_base64, "base64") : Buffer.from(record.value);
  process.stdout.write(Buffer.concat([value, Buffer.from("\n")]));
}

const [verb, ...rest] = process.argv.slice(2);
const verbs = { store: [store, 1], follow: [follow, 2], work: [work, 2] };
if (verbs[verb]?.[1] !== rest.length) {
  console.error("usage: node gate.mjs store ROUTE | follow ROUTE FILE | work ROUTE GROUP");
  process.exit(2);
}
await verbs[verb][0](...rest);
