// What the gateway adds to a request: the same load straight to the origin and through the gateway.
import http from 'k6/http';
import { ALWAYS, TARGETS, arrivals } from './lib/gateway.js';

const ORIGIN = __ENV.ORIGIN || 'http://127.0.0.1:9000';
const RATE = Number(__ENV.RATE || 300);

export const options = {
  discardResponseBodies: true,
  summaryTrendStats: ['med', 'p(95)', 'p(99)', 'max'],
  scenarios: {
    direct: arrivals(RATE, 'direct', { via: 'origin' }),
    gateway: arrivals(RATE, 'gateway', { via: 'gateway' }),
  },
  thresholds: {
    http_req_failed: ['rate==0'],
    dropped_iterations: ALWAYS.dropped_iterations,
    'http_req_duration{via:origin}': ['p(99)<100'],
    'http_req_duration{via:gateway}': ['p(99)<100'],
  },
};

export const direct = () => http.get(`${ORIGIN}/v1/unlimited`, { tags: { name: 'direct' } });
export const gateway = () => http.get(`${TARGETS[0]}/v1/unlimited`, { tags: { name: 'gateway' } });
