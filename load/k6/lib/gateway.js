// Shared by the scripts: gateways, keys and counters.
import { check } from 'k6';
import http from 'k6/http';
import exec from 'k6/execution';
import { Counter, Rate, Trend } from 'k6/metrics';

/** The gateways that share their limits. */
export const TARGETS = (__ENV.TARGETS || 'http://127.0.0.1:8080,http://127.0.0.1:8081').split(',');
/** Their admin listeners, for the scripts that look at their metrics. */
export const ADMINS = (__ENV.ADMINS || '').split(',').filter((address) => address);
/** Seconds of load; the bounds follow from it. */
export const DURATION = Number(__ENV.DURATION || 10);

// A 429 is a valid response, not a failure.
http.setResponseCallback(http.expectedStatuses(200, 429));

export const admitted = new Counter('gw_admitted');
export const limited = new Rate('gw_limited');
export const badFields = new Rate('gw_bad_fields');
export const rejectedTime = new Trend('gw_rejected_duration', true);

/** Spread over the gateways, one after the other. */
export const nextTarget = () => TARGETS[exec.scenario.iterationInTest % TARGETS.length];

/** A whole number of seconds, at least one. */
export const retryAfter = (response) => Number(response.headers['Retry-After']);
const isWait = (seconds) => Number.isInteger(seconds) && seconds >= 1;

/** Counts one answer under `tags`; what is admitted after the time of the load, on a machine that stood still, has a later bound. */
export function count(response, tags = {}) {
  const refused = response.status === 429;
  limited.add(refused, tags);
  if (response.status === 200 && exec.scenario.progress < 1) admitted.add(1, tags);
  if (refused) {
    rejectedTime.add(response.timings.duration, tags);
    badFields.add(!isWait(retryAfter(response)) || !response.headers['X-Request-Id'], tags);
  }
  return response;
}

/** Asks `path` with an API key of keys.toml (none: anonymous), and counts the answer under the scenario's tags. */
export function ask(path, key, target = nextTarget(), tags = {}) {
  const headers = key ? { 'x-api-key': key } : {};
  return count(http.get(`${target}${path}`, { headers, tags: { name: path, ...tags } }), tags);
}

/** An open model: requests start on time whether or not answers have come. */
export const arrivals = (rate, exec, tags, more = {}) => ({
  executor: 'constant-arrival-rate',
  rate,
  timeUnit: '1s',
  duration: `${DURATION}s`,
  // Enough VUs for a machine that stalls for half a second.
  preAllocatedVUs: Math.max(10, Math.ceil(rate / 2)),
  maxVUs: Math.max(40, rate),
  exec,
  tags,
  ...more,
});

/** Of a client far over `rate` (per second) with this burst: never more than its limit, and nearly all of it. */
export const exactly = (rate, burst, seconds = DURATION) => [
  `count<=${Math.floor((rate * seconds + burst) * 1.01)}`,
  `count>=${Math.floor((rate * seconds + burst) * 0.97)}`,
];

/** What a gateway measures of itself now: a function from the beginning of a line of /metrics to the sum of what such lines say. */
export function metricsOf(admin) {
  const headers = { authorization: `Bearer ${__ENV.ADMIN_TOKEN}` };
  const response = http.get(`${admin}/metrics`, { headers, responseType: 'text', tags: { name: '/metrics' } });
  const lines = response.status === 200 ? response.body.split('\n') : [];
  return (beginning) => {
    const found = lines.filter((line) => line.startsWith(beginning));
    return found.length ? found.reduce((sum, line) => sum + Number(line.slice(line.lastIndexOf(' '))), 0) : NaN;
  };
}

/** A teardown that checks that Redis was used. Without Redis each gateway enforces its part of the limit, and the thresholds prove nothing. */
export function together() {
  for (const admin of ADMINS) {
    const metric = metricsOf(admin);
    check(metric, {
      'limits are shared through Redis': () => metric('tidegate_redis_calls_total{outcome="ok"}') > 0 && metric('tidegate_degraded ') === 0,
    });
  }
}

/** What holds for every script: nothing fails, nothing is left unsent, every refusal says when to come back. */
export const ALWAYS = {
  http_req_failed: ['rate==0'],
  dropped_iterations: ['count==0'],
  gw_bad_fields: ['rate==0'],
};
