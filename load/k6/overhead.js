// Measures the latency that the gateway adds. Each request goes directly to the origin and through
// the gateway, one after the other.
import http from 'k6/http';
import exec from 'k6/execution';
import { Trend } from 'k6/metrics';
import { ALWAYS, arrivals, nextTarget } from './lib/gateway.js';

const ORIGIN = __ENV.ORIGIN || 'http://127.0.0.1:9000';
const RATE = Number(__ENV.RATE || 200);

const added = new Trend('gw_added', true);

export const options = {
  discardResponseBodies: true,
  summaryTrendStats: ['med', 'p(95)', 'p(99)', 'max'],
  scenarios: { both: arrivals(RATE, 'both', {}) },
  thresholds: {
    http_req_failed: ['rate==0'],
    dropped_iterations: ALWAYS.dropped_iterations,
    // Generators, gateways and origin share the machine, so only the median shows the gateway's
    // cost.
    gw_added: ['med<5', 'p(95)<100'],
    'http_req_duration{name:gateway}': ['p(95)<100'],
  },
};

const timed = (name, url) => http.get(`${url}/v1/unlimited`, { tags: { name } }).timings.duration;
const direct = () => timed('direct', ORIGIN);
const through = () => timed('gateway', nextTarget());

export function both() {
  // Alternate the order, so that neither path always wakes the origin.
  if (exec.scenario.iterationInTest % 2) {
    const without = direct();
    added.add(through() - without);
  } else {
    const within = through();
    added.add(within - direct());
  }
}
