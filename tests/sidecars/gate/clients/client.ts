// Print the answers of a gate to the TypeScript client that openapi-generator generates.
import { Configuration, DefaultApi, ResponseError } from './openapi_client';

declare const process: { argv: string[] };

async function problem(failing: Promise<unknown>): Promise<unknown[]> {
  try {
    await failing;
  } catch (error) {
    if (error instanceof ResponseError) return [error.response.status, (await error.response.json()).code];
    throw error;
  }
  throw new Error('it was answered without an error');
}

async function main(): Promise<void> {
  const [basePath, accessToken] = process.argv.slice(2);
  const headers = { Accept: 'application/json' }; // otherwise lists come as lines
  const api = new DefaultApi(new Configuration({ basePath, accessToken, headers }));
  const [route, group] = ['orders', 'packing'];

  const newRecord = [{ value: 'one', key: 'ann' }, { value: [2], headers: { a: 'b' } }];
  const stored = await api.append({ route, newRecord });
  const records = await api.records({ route, from: 'earliest', to: '2' });
  await api.setCursor({ route, group, cursorPosition: { sequence: 1 } });
  const cursor = await api.cursor({ route, group });
  const leased = await api.lease({ route, group, lease: { worker: 'ann', maxRecords: 5 } });
  const pending = await api.pending({ route, group });
  const settled = await api.ack({ route, group, ack: { worker: 'ann', sequences: [1, 2, 9] } });

  console.log(JSON.stringify({
    stored: [stored.first, stored.last, stored.count],
    records: records.map((each) => [each.sequence, each.value, each.key ?? null]),
    times: records.every((each) => each.appendTimeNs > 1e18),
    cursor: [cursor.sequence, cursor.state],
    leased: leased.records.map((each) => [each.sequence, each.tries, each.value]),
    pending: pending.map((each) => (each.kind === 'out' ? [each.kind, each.worker] : [each.kind])),
    refused: settled.refused.map((each) => each.sequence),
    problems: [
      await problem(api.records({ route, from: '99' })),
      await problem(api.append({ route: 'secret', newRecord })),
    ],
  }));
}

main();
