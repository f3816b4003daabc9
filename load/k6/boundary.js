// Bursts after two quiet seconds each, so placed that some of them meet an edge, wherever the edges of a window may be: a sliding
// log admits just what it says of every one, a fixed window up to twice as much.
// The limit is `window` of gateway.toml: 50 in any 2 s.
import http from 'k6/http';
import { check, sleep } from 'k6';
import { ALWAYS, TARGETS, count } from './lib/gateway.js';

const LIMIT = 50;
const WINDOW = 2;
// a burst lasts for half a second; starts that are 2.55 s apart leave no 0.4 s between two edges out
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
    // a machine that stood still for two seconds has given the next ones away
    const windows = 1 + Math.floor(since() / WINDOW);
    check(passed, {
      [`no burst is admitted more than ${LIMIT}`]: (n) => n <= LIMIT * windows,
      'and every one as much': (n) => n >= LIMIT,
    });
    // two seconds after the last of it, at least
    sleep(Math.max(APART - since(), WINDOW));
  }
}
