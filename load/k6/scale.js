// A gateway joins after one quarter of the run and leaves after three quarters. The limit over all
// gateways stays the same.
//
// JOINING is the address of this gateway. scripts/load scale starts and stops it. The limit is
// `per_user` of gateway.toml: 100/s, burst 50.
import exec from 'k6/execution';
import { ALWAYS, DURATION, TARGETS, arrivals, ask, exactly, nextTarget } from './lib/gateway.js';

export { together as teardown } from './lib/gateway.js';

const LIMIT = 100;
const BURST = 50;
const JOINING = __ENV.JOINING;
// Send to it only while it surely runs: the clock of the starting script is ahead of this one.
const ASKED = { from: 0.4, until: 0.55 };

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
    'gw_limited{key:quiet}': ['rate==0'],
    ...(JOINING ? { 'gw_admitted{node:joining}': ['count>0'] } : {}),
  },
};

function target() {
  const { iterationInTest: n, progress } = exec.scenario;
  const present = JOINING && progress > ASKED.from && progress < ASKED.until;
  return present && n % (TARGETS.length + 1) === TARGETS.length ? JOINING : nextTarget();
}

function through(key) {
  const chosen = target();
  ask('/v1/items', key, chosen, { node: chosen === JOINING ? 'joining' : 'staying' });
}

export const noisy = () => through('noisy-key');
export const quiet = () => through('quiet-key');
