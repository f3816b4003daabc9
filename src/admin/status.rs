//! `/api/v1/status`: all data of `tidegate top` and of the page at `/`, in one response.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant, SystemTime},
};

use http::Method;
use serde_json::{Value, json};

use super::{
    api_request::ApiRequest, api_response::ApiResponse, decisions, limits, pages::AdminPages,
    status_history::Point,
};
use crate::telemetry::Sample;

/// Number of latest rejections listed.
const LATEST: usize = 20;

/// Time between two points.
const PAUSE: Duration = Duration::from_secs(10);
/// A point costs a scrape. That is cheap except with thousands of routes, so it may use at most
/// 1/SHARE of a core.
const SHARE: u32 = 100;

impl AdminPages {
    /// Adds points for the life of the process.
    pub(super) async fn keep_history(self) {
        loop {
            let began = Instant::now();
            let metrics = self.inner.metrics.clone();
            let counted = tokio::task::spawn_blocking(move || {
                let samples = Samples(metrics.samples());
                (samples.requests(), samples.rejected())
            });
            if let Ok((requests, rejected)) = counted.await {
                let at = SystemTime::now();
                self.inner.history.add(Point {
                    at,
                    requests,
                    rejected,
                });
            }
            tokio::time::sleep(PAUSE.max(began.elapsed() * SHARE)).await;
        }
    }

    pub(super) fn status(&self, call: &ApiRequest) -> ApiResponse {
        if !matches!(call.method, Method::GET | Method::HEAD) {
            return ApiResponse::wrong_method("GET");
        }
        let active = self.inner.current.active();
        let snapshot = active.snapshot();
        let samples = Samples(active.process().metrics().samples());
        let latest = active
            .process()
            .decision_logs()
            .decisions(|one| !one.admitted);
        let upstreams = snapshot.upstreams.iter().map(|upstream| {
            let servers = upstream.servers.iter().map(|server| {
                let name = server.to_string();
                let healthy = samples.of(
                    "tidegate_upstream_healthy",
                    &[("upstream", &upstream.name), ("server", &name)],
                );
                json!({ "name": name, "healthy": healthy > 0.0 })
            });
            let errors = samples.of(
                "tidegate_upstream_errors_total",
                &[("upstream", &upstream.name)],
            );
            json!({
                "name": upstream.name,
                "servers": servers.collect::<Vec<_>>(),
                "errors": errors as u64,
            })
        });
        ApiResponse::ok(json!({
            "version": env!("CARGO_PKG_VERSION"),
            "state": self.inner.readiness.state().as_str(),
            "config": {
                "hash": snapshot.hash,
                "loaded_at_seconds": samples.of("tidegate_config_reload_timestamp_seconds", &[]),
                "last_reload_ok": samples.of("tidegate_config_reload_success", &[]) > 0.0,
            },
            "requests": samples.by_code(),
            "requests_total": samples.requests(),
            "history": self.inner.history.json(),
            "rejected_total": samples.rejected(),
            "in_flight": samples.of("tidegate_in_flight", &[]) as u64,
            "connections": samples.of("tidegate_connections", &[]) as u64,
            "memory_bytes": samples.of("process_resident_memory_bytes", &[]) as u64,
            "redis": snapshot.redis.as_ref().map(|_| samples.redis()),
            "upstreams": upstreams.collect::<Vec<_>>(),
            "limits": limits::limits(&active, &samples.0),
            "kill": limits::kill(&active),
            "latest": latest.iter().take(LATEST).map(decisions::summary).collect::<Vec<_>>(),
        }))
    }
}

struct Samples(Vec<Sample>);

impl Samples {
    /// The sum of the series with these labels.
    fn of(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let series = self.0.iter().filter(|sample| sample.name == name);
        let fits = |sample: &&Sample| {
            labels
                .iter()
                .all(|(label, value)| sample.label(label) == *value)
        };
        series.filter(fits).map(|sample| sample.value).sum()
    }

    fn requests(&self) -> u64 {
        self.of("tidegate_requests_total", &[]) as u64
    }

    fn rejected(&self) -> u64 {
        self.of("tidegate_decisions_total", &[("outcome", "rejected")]) as u64
    }

    fn by_code(&self) -> BTreeMap<&str, u64> {
        let mut codes = BTreeMap::new();
        for sample in self
            .0
            .iter()
            .filter(|sample| sample.name == "tidegate_requests_total")
        {
            *codes.entry(sample.label("code")).or_default() += sample.value as u64;
        }
        codes.retain(|_, count| *count > 0);
        codes
    }

    fn redis(&self) -> Value {
        let calls = |outcome| self.of("tidegate_redis_calls_total", &[("outcome", outcome)]) as u64;
        json!({
            "degraded": self.of("tidegate_degraded", &[]) > 0.0,
            "servers_given_up": self.of("tidegate_redis_breaker_open", &[]) as u64,
            "in_flight_bound": self.of("tidegate_redis_in_flight_bound", &[]) as u64,
            "gateways": self.of("tidegate_lease_gateways", &[]) as u64,
            "calls": { "ok": calls("ok"), "late": calls("late"), "error": calls("error") },
        })
    }
}
