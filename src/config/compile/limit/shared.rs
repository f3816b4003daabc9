//! Shared limits: how gateways synchronise one through Redis, and what it does while Redis is down.

use super::behaviour::contradiction;
use crate::{
    budget::{Sync, WhenDown},
    config::{
        LimitSettings, Over, SharedSettings,
        code::Code,
        diagnostic::{PendingDiagnostic, not_built},
        section::Section,
    },
    limit::SharedMethod,
};

/// Keys that only a shared limit may have.
const FOREIGN: [&str; 3] = ["sync", "on_redis_down", "local_fraction"];

pub(super) fn read(section: &Section<'_>, has_redis: bool, limit: &mut LimitSettings) {
    let scope = section.choice("scope", &[("local", false), ("global", true)]);
    let strict = section.choice("sync", &[("lease", Sync::Lease), ("strict", Sync::Strict)]);
    let behaviour = section.choice(
        "on_redis_down",
        &["local", "open", "closed"].map(|word| (word, word)),
    );
    let fraction = section.share("local_fraction");
    let slack = f64::from(section.share("slack").ppm()) / 1e6;
    let deny_slack = |message: &str, hint: &str| {
        if slack > 0.0 {
            contradiction(section, "slack", message, hint);
        }
    };
    if scope == Some(false) {
        refuse_shared_keys(section);
        deny_slack(
            "`slack` is for limits that gateways share, and this one is local",
            "write scope = \"global\", or remove the key",
        );
    }
    if scope != Some(true) {
        return;
    }
    if behaviour.is_some_and(|behaviour| behaviour != "local") {
        let message =
            "`local_fraction` has no effect: this limit does not fall back to a local share";
        let hint = "write on_redis_down = \"local\", or remove the key";
        contradiction(section, "local_fraction", message, hint);
    }
    let is_log = limit.algorithm.record().shared == SharedMethod::Log;
    if is_log && strict == Some(Sync::Lease) {
        let message = "a sliding log cannot lease units: it asks Redis for every request";
        let hint = "write sync = \"strict\", or another algorithm";
        contradiction(section, "sync", message, hint);
    }
    if is_log || strict == Some(Sync::Strict) || limit.algorithm.holds_slots() {
        deny_slack(
            "`slack` has no effect: this limit asks Redis for every request",
            "write sync = \"lease\" and another algorithm, or remove the key",
        );
    }
    if !has_redis {
        if let Some(scope) = section.get("scope") {
            let message = "there is no [redis]: each gateway counts this limit on its own";
            let problem = PendingDiagnostic::new(Code::NothingShared, message)
                .hint("add [redis], or write scope = \"local\"");
            section.document.warn(scope.name_span(), problem);
        }
        return;
    }
    refuse_delay(section, limit);
    if !limit.count_status.is_empty() {
        deny_slack(
            "`slack` has no effect: this limit is charged when the response is there",
            "remove the key",
        );
    }
    let when_down = match behaviour {
        Some("open") => WhenDown::Open,
        Some("closed") => WhenDown::Closed,
        _ => WhenDown::Local {
            fraction: f64::from(fraction.ppm()) / 1e6,
        },
    };
    limit.shared = Some(SharedSettings {
        sync: if is_log {
            Sync::Strict
        } else {
            strict.unwrap_or(Sync::Lease)
        },
        when_down,
        slack,
    });
}

/// Reports the keys of shared limits in a local one.
fn refuse_shared_keys(section: &Section<'_>) {
    for key in FOREIGN {
        let message = format!("`{key}` is for limits that gateways share, and this one is local");
        let hint = "write scope = \"global\", or remove the key";
        contradiction(section, key, &message, hint);
    }
}

/// A queue needs one order of all requests, and gateways that lease units have none.
fn refuse_delay(section: &Section<'_>, limit: &LimitSettings) {
    if limit.over != Over::Reject
        && let Some(value) = section.get("over")
    {
        let reason = "a queue needs one order of all requests, and each gateway knows only its own";
        let problem = not_built(format!("{} with scope = \"global\"", value.what), reason);
        let hint = "write scope = \"local\", or remove the key";
        let problem = problem.hint(hint);
        section.document.error(value.name_span(), problem);
    }
}
