// A client that waits for Retry-After is admitted at the first retry, at any gateway. The limit is
// `patient` of gateway.toml: 30/min, burst 3.
import { check, sleep } from 'k6';
import { Rate } from 'k6/metrics';
import { ALWAYS, TARGETS, ask, retryAfter } from './lib/gateway.js';

const honoured = new Rate('gw_wait_honoured');

export const options = {
  scenarios: { patient: { executor: 'per-vu-iterations', vus: 5, iterations: 4, maxDuration: '90s' } },
  thresholds: { ...ALWAYS, gw_wait_honoured: ['rate==1'], checks: ['rate==1'] },
};

let asked = __VU;
const askNext = () => ask('/v1/patient', `light-key-${__VU}`, TARGETS[asked++ % TARGETS.length]);

export default function () {
  let response;
  for (let i = 0; i < 20; i++) {
    response = askNext();
    if (response.status === 429) break;
  }
  const dry = check(response, {
    'the bucket runs dry': (r) => r.status === 429,
    'the wait is possible': (r) => retryAfter(r) >= 1 && retryAfter(r) <= 6,
  });
  if (!dry) return;
  sleep(retryAfter(response));
  honoured.add(askNext().status === 200);
}
