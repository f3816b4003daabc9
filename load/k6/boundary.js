// Bursts without a pause, across every edge that a window can have: in no two seconds does a sliding log admit more than it
// says, where a fixed window admits twice as much.
// The limit is `window` of gateway.toml: 50 in any 2 s.
import http from 'k6/http';
import { check, sleep } from 'k6';
import { ALWAYS, TARGETS, count } from './lib/gateway.js';

const LIMIT = 50;
const WINDOW_MS = 2000;
const ROUNDS = 40;

export const options = {
  discardResponseBodies: true,
  scenarios: { edges: { executor: 'per-vu-iterations', vus: 1, iterations: 1, maxDuration: '60s' } },
  thresholds: { ...ALWAYS, checks: ['rate==1'] },
};

export default function () {
  const passed = [];
  for (let round = 0; round < ROUNDS; round++) {
    const begun = Date.now();
    const requests = Array.from({ length: 20 }, (_, i) => ({
      method: 'GET',
      url: `${TARGETS[i % TARGETS.length]}/v1/window`,
      params: { headers: { 'x-api-key': 'noisy-key' }, tags: { name: '/v1/window' } },
    }));
    const answers = http.batch(requests).map((response) => count(response));
    const ended = Date.now();
    passed.push(...answers.filter((r) => r.status === 200).map(() => ({ begun, ended })));
    sleep(0.2);
  }
  // of two requests it is only known when they were sent and answered: those surely within one window of each other count
  const busiest = Math.max(...passed.map((first) => passed.filter((r) => r.begun >= first.begun && r.ended - first.begun <= WINDOW_MS).length));
  const whole = (passed[passed.length - 1].ended - passed[0].begun) / WINDOW_MS;
  check(busiest, { [`no two seconds admit more than ${LIMIT}`]: (n) => n <= LIMIT });
  check(passed.length, { 'and most of what is allowed passes': (n) => n >= LIMIT * Math.floor(whole) * 0.8 });
}
