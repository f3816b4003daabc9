// Sends bursts, each after two quiet seconds, timed so that some cross any window boundary. A
// sliding log admits exactly its limit of each burst; a fixed window admits up to twice as much.
//
// The limit is `window` of gateway.toml: 50 in any 2 s.
import http from 'k6/http';
import { check, sleep } from 'k6';
import { ALWAYS, TARGETS, count } from './lib/gateway.js';

const LIMIT = 50;
const WINDOW = 2;
// A burst lasts half a second. With starts 2.55 s apart, some burst crosses a boundary at any
// offset.
const BURSTS = 8;
const APART = WINDOW + 0.55;
const BATCHES = 10;
const BATCH = 10;

export const options = {
  discardResponseBodies: true,
  scenarios: { edges: { executor: 'per-vu-iterations', vus: 1, iterations: 1, maxDuration: '120s' } },
  thresholds: { ...ALWAYS, checks: ['rate==1'] },
};

const batch = () =>
  Array.from({ length: BATCH }, (_, i) => ({
    method: 'GET',
    url: `${TARGETS[i % TARGETS.length]}/v1/window`,
    params: { headers: { 'x-api-key': 'noisy-key' }, tags: { name: '/v1/window' } },
  }));

export default function () {
  for (let burst = 0; burst < BURSTS; burst++) {
    const begun = Date.now();
    const since = () => (Date.now() - begun) / 1000;
    let passed = 0;
    for (let i = 0; i < BATCHES; i++) {
      passed += http.batch(batch()).filter((response) => count(response).status === 200).length;
      sleep(0.05);
    }
    // A stall of two seconds invalidates the following bursts.
    const windows = 1 + Math.floor(since() / WINDOW);
    check(passed, {
      [`no burst is admitted more than ${LIMIT}`]: (n) => n <= LIMIT * windows,
      'and every one as much': (n) => n >= LIMIT,
    });
    // At least two seconds after the end of the burst.
    sleep(Math.max(APART - since(), WINDOW));
  }
}
