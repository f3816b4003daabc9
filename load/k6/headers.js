// No client header buys more requests: no address and no user, in any spelling.
//
// The limit is `per_ip` of gateway.toml: 60/min, burst 20, which applies to /v1/address. Run this
// only from an untrusted peer.
import http from 'k6/http';
import exec from 'k6/execution';
import { ALWAYS, DURATION, arrivals, count, nextTarget } from './lib/gateway.js';

const BURST = 20;
const PER_SECOND = 1;

export const options = {
  discardResponseBodies: true,
  scenarios: { spoofing: arrivals(100, 'spoof', {}) },
  thresholds: {
    ...ALWAYS,
    gw_admitted: [`count<=${Math.ceil(BURST + PER_SECOND * (DURATION + 1))}`, `count>=${BURST}`],
  },
};

const SPELLINGS = [
  (ip) => ({ 'X-Forwarded-For': ip }),
  (ip) => ({ 'x-forwarded-for': `${ip}, ${ip}` }),
  (ip) => ({ 'X_Forwarded_For': ip }),
  (ip) => ({ Forwarded: `for=${ip}` }),
  (ip) => ({ Forwarded: `for="${ip}:4711";proto=https` }),
  (ip) => ({ 'X-Real-IP': ip }),
  (ip) => ({ 'CF-Connecting-IP': ip }),
  (ip) => ({ 'True-Client-IP': ip }),
  (ip) => ({ 'X-User-Id': ip, 'X-Rate-Limit-Tier': 'internal' }),
  (ip) => ({ 'X-Forwarded-For': ip, Connection: 'X-Forwarded-For' }),
];

export function spoof() {
  const n = exec.scenario.iterationInTest;
  const ip = `203.0.${Math.floor(n / 250) % 250}.${n % 250}`;
  const headers = SPELLINGS[n % SPELLINGS.length](ip);
  count(http.get(`${nextTarget()}/v1/address`, { headers, tags: { name: '/v1/address' } }));
}
