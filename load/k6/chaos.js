// Redis stalls, dies and returns empty under load, as scripts/load chaos arranges. Expect no 5xx,
// no slow response, no second burst, and the whole limit again once Redis is back.
//
// The limit is `per_user` of gateway.toml: 100/s, burst 50, on_redis_down = "local" with
// local_fraction 0.5.
import { check } from 'k6';
import { ADMINS, ALWAYS, DURATION, arrivals, ask, metricsOf } from './lib/gateway.js';

const LIMIT = 100;
const BURST = 50;
// The bound per outage: tokens that a gateway had leased and Redis lost.
const OUTAGES = Number(__ENV.OUTAGES || 2);
const SLACK = 0.1 * BURST * OUTAGES;

export const options = {
  discardResponseBodies: true,
  scenarios: {
    noisy: arrivals(LIMIT * 3, 'noisy', { key: 'noisy' }),
    quiet: arrivals(LIMIT / 5, 'quiet', { key: 'quiet' }),
  },
  thresholds: {
    ...ALWAYS,
    'gw_admitted{key:noisy}': [
      `count<=${Math.floor((LIMIT * DURATION + BURST) * 1.01 + SLACK)}`,
      `count>=${Math.floor(LIMIT * DURATION * 0.75)}`,
    ],
    'gw_limited{key:quiet}': ['rate==0'],
    http_req_duration: ['p(95)<250'],
    checks: ['rate==1'],
  },
};

export const noisy = () => ask('/v1/items', 'noisy-key');
export const quiet = () => ask('/v1/items', 'quiet-key');

export function teardown() {
  for (const admin of ADMINS) {
    const metric = metricsOf(admin);
    check(metric, {
      'the gateways decided without Redis': () => metric('tidegate_degraded_decisions_total') > 0,
      'and is used again': () => metric('tidegate_degraded ') === 0,
    });
  }
}
