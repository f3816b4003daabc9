// A full bucket admits a burst of its size at once, and again after it has refilled.
// The limit is `per_user` of gateway.toml: 100/s, burst 50.
import http from 'k6/http';
import { check, sleep } from 'k6';
import { ALWAYS, TARGETS, count } from './lib/gateway.js';

const LIMIT = 100;
const BURST = 50;

export const options = {
  discardResponseBodies: true,
  scenarios: { burst: { executor: 'per-vu-iterations', vus: 1, iterations: 4, maxDuration: '60s' } },
  batch: 200,
  batchPerHost: 200,
  thresholds: { ...ALWAYS, checks: ['rate==1'] },
};

export default function () {
  const begun = Date.now();
  const requests = Array.from({ length: BURST * 4 }, (_, i) => ({
    method: 'GET',
    url: `${TARGETS[i % TARGETS.length]}/v1/items`,
    params: { headers: { 'x-api-key': 'bursty-key' }, tags: { name: '/v1/items' } },
  }));
  const passed = http.batch(requests).map((response) => count(response)).filter((r) => r.status === 200).length;
  const refilled = Math.ceil(((Date.now() - begun) / 1000) * LIMIT) + 1;
  check(passed, {
    'the whole burst passes': (n) => n >= BURST,
    'and no more than has flowed in meanwhile': (n) => n <= BURST + refilled,
  });
  // Wait until the bucket is full again.
  sleep(BURST / LIMIT + 1);
}
