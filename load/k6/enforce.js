// Sends three times the limit over all gateways: exactly the limit is admitted, and a quiet client
// is not affected. The limit is `per_user` of gateway.toml: 100/s, burst 50.
import { ALWAYS, DURATION, arrivals, ask, exactly } from './lib/gateway.js';

export { together as teardown } from './lib/gateway.js';

const LIMIT = 100;
const BURST = 50;

export const options = {
  discardResponseBodies: true,
  scenarios: {
    noisy: arrivals(LIMIT * 3, 'noisy', { key: 'noisy' }),
    quiet: arrivals(LIMIT / 4, 'quiet', { key: 'quiet' }),
  },
  thresholds: {
    ...ALWAYS,
    checks: ['rate==1'],
    'gw_admitted{key:noisy}': exactly(LIMIT, BURST),
    'gw_limited{key:noisy}': ['rate>0.55', 'rate<0.70'],
    'gw_admitted{key:quiet}': [`count>=${Math.floor((LIMIT / 4) * DURATION * 0.97)}`],
    'gw_limited{key:quiet}': ['rate==0'],
    'http_req_duration{expected_response:true}': ['p(95)<250'],
  },
};

export const noisy = () => ask('/v1/items', 'noisy-key');
export const quiet = () => ask('/v1/items', 'quiet-key');
