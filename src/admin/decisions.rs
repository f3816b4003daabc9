//! `/api/v1/decisions…` and `/api/v1/explain`: why a request got its response, and what a described
//! request would get.

use std::{net::IpAddr, str::FromStr};

use http::{
    HeaderName, HeaderValue, Method, Request, StatusCode,
    header::{CONTENT_LENGTH, HOST},
};
use serde_json::{Value, json};

use super::{api_request::ApiRequest, api_response::ApiResponse, pages::AdminPages};
use crate::{
    gateway::{
        decision_log::RememberedDecision,
        described::{Described, DescribedBody},
        explain::{Explanation, ExplanationText, Outcome, Unexplained},
    },
    listener::tls::PresentedChain,
    telemetry,
};

/// Most decisions in one response.
const SHOWN_MAX: usize = 100;

impl AdminPages {
    /// `decisions` and `decisions/REQUEST_ID`.
    pub(super) fn decisions(&self, path: &[&str], call: &ApiRequest) -> ApiResponse {
        if !matches!(call.method, Method::GET | Method::HEAD) {
            return ApiResponse::wrong_method("GET");
        }
        let active = self.inner.current.active();
        match path {
            [] => {
                let most = call.query("limit_to").and_then(|most| most.parse().ok());
                let found = active
                    .process()
                    .decision_logs()
                    .decisions(|one| is_wanted(one, call));
                let found = found.iter().take(most.unwrap_or(SHOWN_MAX).min(SHOWN_MAX));
                ApiResponse::ok(json!({ "decisions": found.map(summary).collect::<Vec<_>>() }))
            }
            [id] => {
                let found = active
                    .process()
                    .decision_logs()
                    .decisions(|one| one.request_id == *id);
                found
                    .first()
                    .map_or_else(unknown, |one| ApiResponse::ok(whole(one)))
            }
            _ => ApiResponse::nothing(),
        }
    }

    /// `explain`: decides a described request as if it arrived now.
    pub(super) fn explain(&self, call: &ApiRequest) -> ApiResponse {
        if call.method != Method::POST {
            return ApiResponse::wrong_method("POST");
        }
        let explained = call
            .takes(&["method", "url", "headers", "peer", "client_cert", "body"])
            .and_then(|()| described(&call.body))
            .and_then(|described| {
                let explained = self.inner.current.active().explain(&described);
                explained.map_err(|error| {
                    let status = match error {
                        Unexplained::Certificate(_) => StatusCode::BAD_REQUEST,
                        Unexplained::Plan(_) => StatusCode::INTERNAL_SERVER_ERROR,
                    };
                    ApiResponse::error(status, error.to_string())
                })
            });
        match explained {
            Ok(explanation) => ApiResponse::ok(with_text(&explanation)),
            Err(answer) => answer,
        }
    }
}

fn unknown() -> ApiResponse {
    let why = "no decision with this request id: the log keeps only the latest decisions, and a few per second of \
               each key; the access line of the request names the limit and the key";
    ApiResponse::error(StatusCode::NOT_FOUND, why)
}

fn is_wanted(one: &RememberedDecision, call: &ApiRequest) -> bool {
    let explanation = &one.explanation;
    let applied = |outcome: &Outcome| !matches!(outcome, Outcome::NotApplied(_));
    let limit = |name: &str| {
        let mut limits = explanation.limits.iter();
        limits.any(|limit| limit.name == name && applied(&limit.outcome))
    };
    let key = |key: &str| {
        let is_it = |shown: &str| {
            let value = |part: &str| part.split_once('=').is_some_and(|(_, value)| value == key);
            shown == key || shown.split(", ").any(value)
        };
        let mut limits = explanation.limits.iter();
        limits.any(|limit| is_it(&limit.key)) || explanation.who.address.to_string() == key
    };
    call.query("limit").is_none_or(limit)
        && call.query("key").is_none_or(key)
        && call
            .query("route")
            .is_none_or(|name| route(explanation) == name)
        && call
            .query("outcome")
            .is_none_or(|outcome| self::outcome(one) == outcome)
}

fn route(explanation: &Explanation) -> &str {
    let asked = explanation.asked.as_ref();
    asked
        .and_then(|asked| asked.route.as_ref())
        .map_or("(none)", |route| &route.name)
}

fn outcome(one: &RememberedDecision) -> &'static str {
    if one.admitted { "admitted" } else { "rejected" }
}

/// A decision as one element of a list.
pub(super) fn summary(one: &RememberedDecision) -> Value {
    let explanation = &one.explanation;
    let rejecting = explanation
        .limits
        .iter()
        .find(|limit| matches!(limit.outcome, Outcome::Rejected { .. }));
    let asked = explanation.asked.as_ref();
    json!({
        "at": telemetry::moment(one.at),
        "request_id": one.request_id,
        "outcome": outcome(one),
        "client": explanation.who.address.to_string(),
        "user": explanation.who.user,
        "method": asked.map(|asked| &asked.method),
        "path": asked.map(|asked| &asked.path),
        "route": route(explanation),
        "limit": rejecting.map(|limit| &limit.name),
        "key": rejecting.map(|limit| &limit.key),
        "quota": rejecting.map(|limit| &limit.quota),
        "scope": rejecting.map(|limit| limit.scope),
        "mode": rejecting.map(|limit| limit.mode),
        "tier": explanation.who.tier,
    })
}

fn whole(one: &RememberedDecision) -> Value {
    let mut json = with_text(&one.explanation);
    json["at"] = json!(telemetry::moment(one.at));
    json["request_id"] = json!(one.request_id);
    json["outcome"] = json!(outcome(one));
    json
}

fn with_text(explanation: &Explanation) -> Value {
    let mut json = explanation.json();
    json["text"] = json!(ExplanationText(explanation).to_string());
    json
}

/// `{"method":"POST","url":"/login","headers":{"host":"…"},"peer":"203.0.113.9","body":"…"}`.
fn described(described: &Value) -> Result<Described, ApiResponse> {
    let bad = |why: &str| ApiResponse::error(StatusCode::BAD_REQUEST, why);
    let text = |name: &str, default: &str| match &described[name] {
        Value::Null => Ok(default.to_owned()),
        Value::String(text) => Ok(text.clone()),
        _ => Err(bad(&format!("{name} must be a string"))),
    };
    let method = Method::from_bytes(text("method", "GET")?.as_bytes());
    let method = method.map_err(|_| bad("method is not a valid HTTP method"))?;
    let url = text("url", "")?;
    let uri: http::Uri = url
        .parse()
        .map_err(|_| bad("url is not a URL; write http://HOST/PATH or /PATH"))?;
    let target = uri
        .path_and_query()
        .filter(|_| uri.authority().is_none() || uri.scheme().is_some());
    let target = target.ok_or_else(|| bad("url is not a URL; write http://HOST/PATH or /PATH"))?;
    let mut request = Request::builder().method(method).uri(target.to_string());
    for (name, value) in pairs(&described["headers"]).ok_or_else(|| bad(HEADERS))? {
        let name = HeaderName::from_str(&name).map_err(|_| bad(HEADERS))?;
        let value = HeaderValue::from_str(&value).map_err(|_| bad(HEADERS))?;
        request = request.header(name, value);
    }
    let request = request
        .body(())
        .map_err(|_| bad("the request cannot be read"))?;
    let (mut head, ()) = request.into_parts();
    if !head.headers.contains_key(HOST) {
        let host = uri
            .authority()
            .map_or("localhost", |authority| authority.as_str());
        let host = HeaderValue::from_str(host).map_err(|_| bad("url has no host"))?;
        head.headers.insert(HOST, host);
    }
    let peer = text("peer", "127.0.0.1")?;
    let peer: IpAddr = peer.parse().map_err(|_| bad("peer is not an IP address"))?;
    let body = match &described["body"] {
        Value::Null => None,
        Value::String(text) => Some(text.clone().into_bytes()),
        _ => return Err(bad("body must be a string")),
    };
    if let Some(body) = body
        .as_ref()
        .filter(|_| !head.headers.contains_key(CONTENT_LENGTH))
    {
        head.headers.insert(CONTENT_LENGTH, body.len().into());
    }
    let certificate = match &described["client_cert"] {
        Value::Null => None,
        Value::String(pem) => {
            let presented = PresentedChain::parse(pem.as_bytes());
            Some(presented.map_err(|fault| bad(&format!("client_cert {fault}")))?)
        }
        _ => {
            return Err(bad(
                "client_cert must be a string: a certificate in PEM form",
            ));
        }
    };
    Ok(Described {
        head,
        peer,
        certificate,
        body: body.map_or(DescribedBody::Absent, DescribedBody::Whole),
    })
}

const HEADERS: &str =
    r#"headers is {"name":"value"}, or [["name","value"]] where a name is repeated"#;

fn pairs(headers: &Value) -> Option<Vec<(String, String)>> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    match headers {
        Value::Null => Some(Vec::new()),
        Value::Object(fields) => {
            let fields = fields.iter();
            fields
                .map(|(name, value)| Some((name.clone(), text(value)?)))
                .collect()
        }
        Value::Array(fields) => {
            let pair = |field: &Value| Some((text(field.get(0)?)?, text(field.get(1)?)?));
            fields.iter().map(pair).collect()
        }
        _ => None,
    }
}
