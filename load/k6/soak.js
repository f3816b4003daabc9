// Many clients for a long time: memory and keys stay within their bounds, nothing fails. DURATION is in seconds; ten minutes
// and more are worth waiting for.
import http from 'k6/http';
import { check } from 'k6';
import exec from 'k6/execution';
import { ALWAYS, arrivals, count, nextTarget } from './lib/gateway.js';

const ADMIN = __ENV.ADMIN;
const RATE = Number(__ENV.RATE || 500);
const MAX_KEYS = 100_000;
const MAX_BYTES = 200 * 1024 * 1024;

export const options = {
  discardResponseBodies: false,
  scenarios: { many: arrivals(RATE, 'many', {}) },
  thresholds: { ...ALWAYS, checks: ['rate==1'] },
};

export function many() {
  const headers = { 'x-client': `client-${exec.scenario.iterationInTest}` };
  count(http.get(`${nextTarget()}/v1/many`, { headers, tags: { name: '/v1/many' } }));
}

export function teardown() {
  if (!ADMIN) return;
  const text = http.get(`${ADMIN}/metrics`, { headers: { authorization: `Bearer ${__ENV.ADMIN_TOKEN}` } }).body;
  const value = (pattern) => Number((text.match(pattern) || [])[1]);
  check(text, {
    'keys stay within max_keys': () => value(/^tidegate_keys\{limit="many"\} (\S+)/m) <= MAX_KEYS,
    'memory stays bounded': () => value(/^process_resident_memory_bytes (\S+)/m) <= MAX_BYTES,
    'no panic': () => value(/^tidegate_panics_total (\S+)/m) === 0,
  });
}
