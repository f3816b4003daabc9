// One heavy client and fifty light ones: the heavy one gets exactly its limit, and no light one is
// rejected. The limit is `per_user` of gateway.toml: 100/s, burst 50.
import exec from 'k6/execution';
import { ALWAYS, arrivals, ask, exactly } from './lib/gateway.js';

export { together as teardown } from './lib/gateway.js';

const LIMIT = 100;
const BURST = 50;
const LIGHT = 50;

export const options = {
  discardResponseBodies: true,
  scenarios: {
    heavy: arrivals(LIMIT * 4, 'heavy', { key: 'heavy' }),
    light: arrivals(LIGHT * 4, 'light', { key: 'light' }),
  },
  thresholds: {
    ...ALWAYS,
    checks: ['rate==1'],
    'gw_admitted{key:heavy}': exactly(LIMIT, BURST),
    'gw_limited{key:heavy}': ['rate>0.5'],
    'gw_limited{key:light}': ['rate==0'],
  },
};

export const heavy = () => ask('/v1/items', 'heavy-key');
export const light = () => ask('/v1/items', `light-key-${1 + (exec.scenario.iterationInTest % LIGHT)}`);
