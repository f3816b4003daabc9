// Checks that every gateway answers, sends its limits, and is ready.
import http from 'k6/http';
import { check } from 'k6';
import { ADMINS, ALWAYS, TARGETS, ask } from './lib/gateway.js';

export const options = {
  scenarios: { smoke: { executor: 'per-vu-iterations', vus: 1, iterations: 5 } },
  thresholds: { ...ALWAYS, checks: ['rate==1'] },
};

export default function () {
  for (const target of TARGETS) {
    const response = ask('/v1/items', 'quiet-key', target);
    check(response, {
      admitted: (r) => r.status === 200,
      // k6 changes the case of header names.
      'RateLimit contains the remaining quota': (r) => /^"per_user";r=\d+(;t=\d+)?/.test(r.headers['Ratelimit'] || ''),
      'RateLimit-Policy contains the quota': (r) => /^"per_user";q=\d+;w=\d+/.test(r.headers['Ratelimit-Policy'] || ''),
    });
  }
  for (const admin of ADMINS) {
    check(http.get(`${admin}/readyz`, { tags: { name: '/readyz' } }), { ready: (r) => r.status === 200 });
  }
}
