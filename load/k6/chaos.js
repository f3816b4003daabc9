// Redis is stopped, paused, restarted (by whoever runs this: scripts/load chaos does) while load goes on: no 5xx, no slow
// answer, and never more than the documented fallback admits.
// The limit is `per_user` of gateway.toml: 100/s, burst 50, on_redis_down = "local" with local_fraction 0.5 per gateway.
import { ALWAYS, DURATION, TARGETS, arrivals, ask } from './lib/gateway.js';

const LIMIT = 100;
const BURST = 50;
// while Redis is away each gateway admits at most its fraction of the limit, from a full bucket each time it goes away
const LOCAL_FRACTION = 0.5;
const OUTAGES = Number(__ENV.OUTAGES || 2);
const share = Math.max(1, TARGETS.length * LOCAL_FRACTION);

export const options = {
  discardResponseBodies: true,
  scenarios: {
    noisy: arrivals(LIMIT * 3, 'noisy', { key: 'noisy' }),
    quiet: arrivals(LIMIT / 5, 'quiet', { key: 'quiet' }),
  },
  thresholds: {
    ...ALWAYS,
    'gw_admitted{key:noisy}': [
      `count<=${Math.floor((LIMIT * DURATION * share + BURST * (1 + OUTAGES * 2)) * 1.02)}`,
      `count>=${Math.floor(LIMIT * DURATION * LOCAL_FRACTION * 0.9)}`,
    ],
    'gw_limited{key:quiet}': ['rate==0'],
    'http_req_duration{key:quiet}': ['p(99)<100'],
  },
};

export const noisy = () => ask('/v1/items', 'noisy-key');
export const quiet = () => ask('/v1/items', 'quiet-key');
