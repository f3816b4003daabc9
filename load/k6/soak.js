// New clients arrive all the time, and one client exceeds its limit. Memory and keys stay bounded,
// and no request fails. Run it for ten minutes or more: at 500 requests a second, a gateway's table
// fills in one minute.
import { check } from 'k6';
import exec from 'k6/execution';
import http from 'k6/http';
import { Trend } from 'k6/metrics';
import { ADMINS, ALWAYS, DURATION, arrivals, count, metricsOf, nextTarget } from './lib/gateway.js';

const RATE = Number(__ENV.RATE || 500);
// server.max_keys of gateway.toml. A table has a third more slots, in groups of four.
const MAX_KEYS = 10_000;
const SLOTS = 4 * Math.ceil(MAX_KEYS / 3);
const MIB = 1024 * 1024;

const keys = new Trend('gw_keys');
const memory = new Trend('gw_memory_mib');
const growth = new Trend('gw_memory_growth_mib');

export const options = {
  discardResponseBodies: true,
  scenarios: {
    many: arrivals(RATE, 'many', {}),
    watch: arrivals(1, 'watch', {}, { preAllocatedVUs: 1, maxVUs: 1, startTime: '1s', duration: `${DURATION - 1}s` }),
  },
  thresholds: {
    ...ALWAYS,
    checks: ['rate==1'],
    // Checks that there were enough keys to reach the bound.
    gw_keys: [`max<=${SLOTS}`, `max>=${MAX_KEYS}`],
    gw_limited: ['rate>0.15', 'rate<0.25'],
    gw_memory_mib: ['max<200', 'min>0'],
    // Growth from one third of the run, when all code has run once, to the end.
    gw_memory_growth_mib: ['max<8'],
  },
};

export function many() {
  const n = exec.scenario.iterationInTest;
  const headers = { 'x-client': n % 5 ? `client-${n}` : 'the-same' };
  count(http.get(`${nextTarget()}/v1/many`, { headers, tags: { name: '/v1/many' } }));
}

const before = {};

/** By one VU, which remembers what it has seen. */
export function watch() {
  check(ADMINS.length, { 'somebody watches (ADMINS)': (n) => n > 0 });
  for (const admin of ADMINS) {
    const metric = metricsOf(admin);
    const held = metric('process_resident_memory_bytes') / MIB;
    keys.add(metric('tidegate_keys{limit="many"}'));
    memory.add(held);
    if (exec.scenario.progress > 1 / 3) {
      before[admin] ??= held;
      growth.add(held - before[admin]);
    }
    check(metric, { 'no panic': () => metric('tidegate_panics_total') === 0 });
  }
}
