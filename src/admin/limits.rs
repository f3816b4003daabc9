//! `/api/v1/limits…`: limits and keys as JSON, and runtime overrides by operators.
//!
//! A runtime override applies from the next decision on, in this process. It ends when it expires,
//! when it is revoked, or with the process. Reloads keep it. Every change is logged with its
//! author's address.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use http::{Method, StatusCode};
use serde_json::{Map, Value, json};

use super::{api_request::ApiRequest, api_response::ApiResponse, pages::AdminPages};
use crate::{
    config::{self, Effect, Mode},
    gateway::{
        ActiveConfig,
        admin_view::{KeyStanding, KeyView, LimitView, NoKey, OverrideScope, QuotaChoice},
        runtime_overrides::{
            Expiry, KeyOverride, LimitOverrides, ModeOverride, OverrideSubject, QuotaGrant,
            RuntimeOverrides, TooManyOverrides,
        },
    },
    telemetry::{self, Sample},
};

impl AdminPages {
    /// `limits`, `limits/NAME/mode`, `limits/NAME/keys/KEY`, `…/boost`, `…/ban`.
    pub(super) fn limits(&self, path: &[&str], call: &ApiRequest) -> ApiResponse {
        let active = self.inner.current.active();
        let answered = match (path, &call.method) {
            ([], &Method::GET | &Method::HEAD) => Ok(ApiResponse::ok(json!({
                "limits": limits(&active, &active.process().metrics().samples()),
                "kill": kill(&active),
            }))),
            ([], _) => Err(ApiResponse::wrong_method("GET")),
            ([limit], &Method::GET | &Method::HEAD) => one(&active, limit),
            ([_], _) => Err(ApiResponse::wrong_method("GET")),
            ([limit, "mode"], &Method::PUT) => set_mode(&active, Some(limit), call),
            ([_, "mode"], _) => Err(ApiResponse::wrong_method("PUT")),
            // slashes in a key need no escaping
            ([limit, "keys", key @ .., "boost"], &Method::POST) => {
                boost(&active, limit, &key.join("/"), call)
            }
            ([limit, "keys", key @ .., "ban"], &Method::POST) => {
                ban(&active, limit, &key.join("/"), call)
            }
            ([limit, "keys", key @ ..], &Method::GET | &Method::HEAD) => {
                show_key(&active, limit, &key.join("/"), call.query("tier"))
            }
            ([limit, "keys", key @ ..], &Method::DELETE) => {
                reset(&active, limit, &key.join("/"), call)
            }
            ([_, "keys", ..], _) => Err(ApiResponse::wrong_method("GET, DELETE")),
            _ => Err(ApiResponse::nothing()),
        };
        answered.unwrap_or_else(|answer| answer)
    }

    /// `kill`: all limits at once.
    pub(super) fn kill(&self, call: &ApiRequest) -> ApiResponse {
        let active = self.inner.current.active();
        let answered = match call.method {
            Method::GET | Method::HEAD => Ok(ApiResponse::ok(json!({ "kill": kill(&active) }))),
            Method::PUT | Method::POST => set_mode(&active, None, call),
            Method::DELETE => call.takes(&["scope"]).and_then(|()| {
                let reach = rule_mode(&active, None, None, scope(call)?)?;
                tracing::warn!(from = %call.from, reach, "an operator has ended the override of all limits");
                Ok(ApiResponse::ok(
                    json!({ "ok": true, "kill": null, "reach": reach }),
                ))
            }),
            _ => Err(ApiResponse::wrong_method("GET, PUT, DELETE")),
        };
        answered.unwrap_or_else(|answer| answer)
    }
}

/// Describes an override of all limits; `null` if there is none.
pub(super) fn kill(active: &ActiveConfig) -> Value {
    let runtime_overrides = active.process().runtime_overrides();
    acting(
        runtime_overrides.mode_of_all(),
        runtime_overrides.local_mode_of_all(),
    )
}

/// The stronger of the runtime overrides for all gateways and for this one, with its scope.
fn acting(all: Option<ModeOverride>, here: Option<ModeOverride>) -> Value {
    let (acting, scope) = match (all, here) {
        (None, None) => return Value::Null,
        (Some(all), Some(here)) if here.mode == Mode::Off && all.mode != Mode::Off => {
            (here, Scope::Gateway)
        }
        (Some(all), _) => (all, Scope::All),
        (None, Some(here)) => (here, Scope::Gateway),
    };
    json!({
        "mode": acting.mode.as_str(),
        "until": until_json(acting.until),
        "scope": scope.word(),
    })
}

/// The scope of a mode override.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    /// This gateway only.
    Gateway,
    /// All gateways on the same Redis.
    All,
}

impl Scope {
    fn word(self) -> &'static str {
        match self {
            Scope::Gateway => "gateway",
            Scope::All => "all",
        }
    }
}

/// `"scope"` of a body; all gateways by default.
fn scope(call: &ApiRequest) -> Result<Scope, ApiResponse> {
    match &call.body["scope"] {
        Value::Null => Ok(Scope::All),
        Value::String(word) if word == "all" => Ok(Scope::All),
        Value::String(word) if word == "gateway" => Ok(Scope::Gateway),
        _ => {
            let why =
                r#"scope is "gateway" for this one, or "all" for every gateway on the same Redis"#;
            Err(ApiResponse::error(StatusCode::BAD_REQUEST, why))
        }
    }
}

/// Overrides the mode of a limit (`None`: all limits) on this gateway or on all. A mode of `None`
/// revokes the override; with scope `all` also the one on this gateway.
fn rule_mode(
    active: &ActiveConfig,
    limit: Option<&str>,
    acting: Option<ModeOverride>,
    scope: Scope,
) -> Result<&'static str, ApiResponse> {
    let runtime_overrides = active.process().runtime_overrides();
    if scope == Scope::Gateway || acting.is_none() {
        match limit {
            Some(limit) => runtime_overrides.set_local_mode(limit, acting),
            None => runtime_overrides.set_local_mode_of_all(acting),
        }
    }
    if scope == Scope::Gateway {
        return Ok("this gateway");
    }
    let about = limit.map_or(OverrideSubject::All, OverrideSubject::Limit);
    rule(active, about, |runtime_overrides| {
        match limit {
            Some(limit) => runtime_overrides.set_mode(limit, acting),
            None => runtime_overrides.set_mode_of_all(acting),
        }
        Ok(())
    })
}

/// All limits in configuration order.
pub(super) fn limits(active: &ActiveConfig, samples: &[Sample]) -> Vec<Value> {
    let limits = active.limits().into_iter();
    limits.map(|limit| limit_json(&limit, samples)).collect()
}

fn one(active: &ActiveConfig, name: &str) -> Result<ApiResponse, ApiResponse> {
    let limits = active.limits();
    let found = limits.iter().find(|limit| limit.settings.name == name);
    let limit = found.ok_or_else(|| refused(&NoKey::Limit(name.to_owned())))?;
    Ok(ApiResponse::ok(limit_json(
        limit,
        &active.process().metrics().samples(),
    )))
}

fn limit_json(limit: &LimitView, samples: &[Sample]) -> Value {
    let settings = &limit.settings;
    let mine = |sample: &&Sample| sample.label("limit") == settings.name;
    let mut decisions = Map::new();
    for outcome in [
        "admitted",
        "rejected",
        "delayed",
        "shadow_rejected",
        "tagged",
        "exempt",
    ] {
        let counted = samples.iter().filter(mine).filter(|sample| {
            sample.name == "tidegate_decisions_total" && sample.label("outcome") == outcome
        });
        let count: f64 = counted.map(|sample| sample.value).sum();
        decisions.insert(outcome.to_owned(), json!(count as u64));
    }
    let near = samples.iter().filter(mine);
    let near = near.filter(|sample| sample.name == "tidegate_near_limit_total");
    let near: f64 = near.map(|sample| sample.value).sum();
    // for a shared limit, the keys that this gateway leases from Redis; its own buckets are used
    // only while Redis is unavailable
    let held = samples.iter().filter(mine);
    let held = held.filter(|sample| sample.name == "tidegate_lease_keys");
    let held: f64 = held.map(|sample| sample.value).sum();
    let disagree = samples.iter().filter(mine);
    let disagree = disagree
        .filter(|sample| sample.name == "tidegate_lease_disagreement")
        .any(|sample| sample.value > 0.0);
    let tier = |place: usize| {
        let named = settings.tiers.iter().filter(|(_, quota)| *quota == place);
        named.map(|(name, _)| name.as_str()).collect::<Vec<_>>()
    };
    let quotas = settings.quotas.iter().enumerate();
    let quotas: Vec<Value> = quotas
        .map(|(place, quota)| {
            json!({ "rate": quota.to_string(), "burst": quota.burst, "tiers": tier(place) })
        })
        .collect();
    let top: Vec<Value> = limit
        .top
        .iter()
        .map(|top| json!({ "key": top.name, "rejected_last_minute": top.rejected.round() as u64 }))
        .collect();
    json!({
        "name": settings.name,
        "algorithm": limit.algorithm,
        "key": settings.key.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "quotas": quotas,
        "scope": settings.scope(),
        "gateways_disagree": disagree,
        "mode": limit.mode.as_str(),
        "configured_mode": settings.mode.as_str(),
        "runtime_override": acting(limit.runtime_overrides.shared_mode(), limit.runtime_overrides.local_mode()),
        "keys": limit.keys + held as u64,
        "guaranteed_keys": limit.guaranteed,
        "evictions": limit.evictions,
        "overflows": limit.overflowed,
        "decisions": decisions,
        "near_limit": near as u64,
        "top": top,
        "key_runtime_overrides": key_overrides_json(&limit.runtime_overrides),
    })
}

fn key_overrides_json(runtime_overrides: &LimitOverrides) -> Vec<Value> {
    let all = runtime_overrides.on_keys().into_iter();
    all.map(|(key, key_override)| {
        let mut json = key_override_json(&key_override);
        json["key"] = json!(key);
        json
    })
    .collect()
}

fn key_override_json(key_override: &KeyOverride) -> Value {
    let boost = key_override.boost.as_ref().map(|boost| {
        json!({ "amount": boost.amount, "left": boost.left(), "until": until_json(boost.until) })
    });
    json!({
        "banned": key_override.banned.is_some(),
        "banned_until": key_override.banned.map(until_json),
        "boost": boost,
    })
}

fn until_json(until: Expiry) -> Value {
    until.map_or(Value::Null, |until| json!(telemetry::moment(until)))
}

fn show_key(
    active: &ActiveConfig,
    limit: &str,
    key: &str,
    tier: Option<&str>,
) -> Result<ApiResponse, ApiResponse> {
    let view = active
        .key(limit, key, tier)
        .map_err(|error| refused(&error))?;
    Ok(ApiResponse::ok(key_json(active, limit, &view)))
}

fn key_json(active: &ActiveConfig, limit: &str, view: &KeyView) -> Value {
    let key_override = active
        .process()
        .runtime_overrides()
        .on(limit)
        .on_key(&view.name);
    let mut json = key_override
        .as_ref()
        .map_or_else(|| json!({}), key_override_json);
    json["limit"] = json!(limit);
    json["key"] = json!(view.name);
    standing_json(&mut json, &view.stands);
    let (tier, why, exception) = match &view.applies {
        QuotaChoice::Override(exception) => (None, "override", Some(exception)),
        QuotaChoice::Exempt => (None, "exempt", None),
        QuotaChoice::Asked(tier) => (Some(tier), "asked", None),
        QuotaChoice::LastSeen(tier) => (tier.as_ref(), "last_seen", None),
        QuotaChoice::Only => (None, "only_quota", None),
        QuotaChoice::Unknown => (None, "unknown", None),
    };
    json["tier"] = json!(tier);
    json["quota_from"] = json!(why);
    json["override"] = exception.map_or(Value::Null, |exception| {
        let effect = match exception.effect {
            Effect::Quota(_) => "quota",
            Effect::Exempt => "exempt",
            Effect::Block => "block",
        };
        json!({
            "for": exception.target.to_string(),
            "effect": effect,
            "until": until_json(exception.until),
            "note": exception.note,
        })
    });
    let tiers = view.tiers.iter().map(|(tier, stands)| {
        let mut json = json!({ "tier": tier });
        standing_json(&mut json, stands);
        json
    });
    json["tiers"] = tiers.collect();
    json["source"] = json!(view.source);
    json
}

fn standing_json(json: &mut Value, stands: &KeyStanding) {
    json["rate"] = json!(stands.rate);
    json["capacity"] = json!(stands.capacity);
    json["spent"] = json!(stands.capacity.saturating_sub(stands.remaining));
    json["remaining"] = json!(stands.remaining);
    json["reset_seconds"] = json!(stands.reset.as_secs_f64());
    json["retry_after_seconds"] = json!(stands.retry_after.map(|wait| wait.as_secs_f64()));
}

/// `PUT {"mode":"off","for":"15m"}`; `null` or `"configured"` revokes it.
fn set_mode(
    active: &ActiveConfig,
    limit: Option<&str>,
    call: &ApiRequest,
) -> Result<ApiResponse, ApiResponse> {
    call.takes(&["mode", "for", "until", "scope"])?;
    let scope = scope(call)?;
    let mode = match call.body["mode"].as_str() {
        Some("off") => Some(Mode::Off),
        Some("shadow") => Some(Mode::Shadow),
        Some("configured") => None,
        None if limit.is_none() && call.body["mode"].is_null() => Some(Mode::Off),
        _ => {
            let why =
                r#"mode must be "off", "shadow", or "configured" to end the runtime override"#;
            return Err(ApiResponse::error(StatusCode::BAD_REQUEST, why));
        }
    };
    let until = until(call)?;
    if mode.is_none() && until.is_some() {
        let why = r#"mode "configured" takes no end; leave out for and until"#;
        return Err(ApiResponse::error(StatusCode::BAD_REQUEST, why));
    }
    let mode_override = mode.map(|mode| ModeOverride { mode, until });
    if let Some(limit) = limit {
        known(active, limit)?;
    }
    let reach = rule_mode(active, limit, mode_override, scope)?;
    let mode = mode.map_or("configured", Mode::as_str);
    let ends = until.map_or_else(|| "no end".to_owned(), telemetry::moment);
    tracing::warn!(from = %call.from, limit = limit.unwrap_or("(all)"), mode, until = ends, reach, "an operator has changed the mode of a limit");
    Ok(ApiResponse::ok(
        json!({ "ok": true, "limit": limit, "mode": mode, "until": until_json(until), "reach": reach }),
    ))
}

/// `POST {"amount":100,"until":"2027-01-31T18:00:00Z"}`.
fn boost(
    active: &ActiveConfig,
    limit: &str,
    key: &str,
    call: &ApiRequest,
) -> Result<ApiResponse, ApiResponse> {
    call.takes(&["amount", "for", "until"])?;
    let amount = call.body["amount"].as_u64().filter(|amount| *amount > 0);
    let amount = amount.ok_or_else(|| {
        ApiResponse::error(
            StatusCode::BAD_REQUEST,
            "amount must be a whole number of units, at least 1",
        )
    })?;
    let until = until(call)?.or_else(|| SystemTime::now().checked_add(BOOST_FOR));
    let gateways = active.process().metrics().samples();
    let gateways = gateways
        .iter()
        .find(|sample| sample.name == "tidegate_lease_gateways");
    // each gateway grants its part
    let gateways = gateways.map_or(1, |sample| (sample.value as u64).max(1));
    let boost = Arc::new(QuotaGrant::new(amount.div_ceil(gateways), until));
    change(active, limit, key, call, "boosted", until, |key_override| {
        key_override.boost = Some(boost);
    })
}

/// `POST {"for":"1h"}`.
fn ban(
    active: &ActiveConfig,
    limit: &str,
    key: &str,
    call: &ApiRequest,
) -> Result<ApiResponse, ApiResponse> {
    call.takes(&["for", "until"])?;
    let until = until(call)?;
    change(active, limit, key, call, "banned", until, |key_override| {
        key_override.banned = Some(until);
    })
}

fn change(
    active: &ActiveConfig,
    limit: &str,
    key: &str,
    call: &ApiRequest,
    what: &'static str,
    until: Expiry,
    change: impl FnOnce(&mut KeyOverride),
) -> Result<ApiResponse, ApiResponse> {
    let key = active
        .key_name(limit, key)
        .map_err(|error| refused(&error))?;
    let reach = rule(
        active,
        OverrideSubject::Key(limit, &key),
        |runtime_overrides| runtime_overrides.rule_key(limit, &key, change),
    )?;
    let ends = until.map_or_else(|| "no end".to_owned(), telemetry::moment);
    tracing::warn!(from = %call.from, limit, key, until = ends, reach, "an operator has {what} a key");
    changed(active, limit, &key, reach)
}

/// `DELETE`: treats the key as new; its bans and boosts end.
fn reset(
    active: &ActiveConfig,
    limit: &str,
    key: &str,
    call: &ApiRequest,
) -> Result<ApiResponse, ApiResponse> {
    call.takes(&[])?;
    let key = active
        .key_name(limit, key)
        .map_err(|error| refused(&error))?;
    let reach = rule(
        active,
        OverrideSubject::Key(limit, &key),
        |runtime_overrides| {
            runtime_overrides.rule_key(limit, &key, |key_override| {
                *key_override = KeyOverride::default()
            })
        },
    )?;
    if active.is_shared(limit) {
        let why = "bans and boosts of this key have ended, but the usage of a shared limit cannot be reset; grant the key units with …/boost";
        return Err(ApiResponse::error(StatusCode::CONFLICT, why));
    }
    active.reset(limit, &key).map_err(|error| refused(&error))?;
    tracing::warn!(from = %call.from, limit, key, "an operator has reset a key");
    changed(active, limit, &key, reach)
}

/// Applies an override here and publishes it to other gateways; returns its reach.
fn rule(
    active: &ActiveConfig,
    about: OverrideSubject<'_>,
    rule: impl FnOnce(&RuntimeOverrides) -> Result<(), TooManyOverrides>,
) -> Result<&'static str, ApiResponse> {
    match active.set_and_publish(about, rule) {
        Ok(OverrideScope::All) => Ok("all gateways"),
        Ok(OverrideScope::ThisOne) => Ok("this gateway"),
        Err(full) => Err(ApiResponse::error(StatusCode::CONFLICT, full.to_string())),
    }
}

/// The state of a key after a change.
fn changed(
    active: &ActiveConfig,
    limit: &str,
    key: &str,
    reach: &'static str,
) -> Result<ApiResponse, ApiResponse> {
    let view = active
        .key(limit, key, None)
        .map_err(|error| refused(&error))?;
    let mut json = key_json(active, limit, &view);
    json["reach"] = json!(reach);
    json["ok"] = json!(true);
    Ok(ApiResponse::ok(json))
}

fn known(active: &ActiveConfig, limit: &str) -> Result<(), ApiResponse> {
    let limits = active.limits();
    let found = limits.iter().any(|known| known.settings.name == limit);
    found
        .then_some(())
        .ok_or_else(|| refused(&NoKey::Limit(limit.to_owned())))
}

/// How long a boost without an end lasts.
const BOOST_FOR: Duration = Duration::from_secs(24 * 3_600);

/// Longest duration of an override. One without an end lasts until revoked.
const FOR_MAX: Duration = Duration::from_secs(366 * 24 * 3_600);

/// When a runtime override ends: after `for`, at `until`, or never (`None`).
fn until(call: &ApiRequest) -> Result<Expiry, ApiResponse> {
    let bad = |why: String| ApiResponse::error(StatusCode::BAD_REQUEST, why);
    let now = SystemTime::now();
    let until = match (&call.body["for"], &call.body["until"]) {
        (Value::Null, Value::Null) => return Ok(None),
        (Value::String(span), Value::Null) => {
            let span = config::parse_span(span).map_err(bad)?;
            now.checked_add(span)
        }
        (Value::Null, Value::String(moment)) => Some(config::parse_moment(moment).map_err(bad)?),
        _ => {
            let why = r#"give "for":"15m" or "until":"2027-01-31T18:00:00Z", not both"#;
            return Err(bad(why.to_owned()));
        }
    };
    until
        .filter(|until| *until > now && *until <= now + FOR_MAX)
        .map(Some)
        .ok_or_else(|| bad("the end must lie in the future, at most a year away".to_owned()))
}

fn refused(error: &NoKey) -> ApiResponse {
    let status = match error {
        NoKey::Limit(_) => StatusCode::NOT_FOUND,
        NoKey::Name(..) => StatusCode::BAD_REQUEST,
    };
    ApiResponse::error(status, error.to_string())
}
