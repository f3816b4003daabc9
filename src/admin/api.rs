//! `/api/v1/…`: the JSON API of a running gateway, for programs and the command line.
//!
//! **Access.** The rules of [`AdminPages`] apply to every request: the token if one is configured,
//! and a loopback `Host` on a loopback address. A request that changes state must also not come
//! from a web page. Its body, if any, must be `application/json`, which a page cannot send
//! cross-origin without a preflight (Fetch §4.8). Requests that a browser marks as cross-site are
//! refused. Every change is logged with the client's address.

use std::net::IpAddr;

use bytes::Bytes;
use http::{
    HeaderMap, HeaderValue, Method, Request, Response, StatusCode,
    header::{ALLOW, CONTENT_TYPE, ORIGIN},
    request::Parts,
};
use http_body::Body;
use serde_json::{Value, json};

use super::{
    AdminPages,
    connections::{AdminConnection, NoBody},
    reload, text,
};

/// Most bytes of a request body.
const BODY_MAX_BYTES: usize = 64 * 1024;

/// The response of an operation.
#[derive(Debug)]
pub(super) struct ApiResponse {
    status: StatusCode,
    json: Value,
    allow: Option<&'static str>,
}

impl ApiResponse {
    pub(super) fn new(status: StatusCode, json: Value) -> Self {
        Self {
            status,
            json,
            allow: None,
        }
    }

    pub(super) fn ok(json: Value) -> Self {
        Self::new(StatusCode::OK, json)
    }

    pub(super) fn error(status: StatusCode, why: impl Into<String>) -> Self {
        let why: String = why.into();
        Self::new(status, json!({ "ok": false, "error": why }))
    }

    pub(super) fn nothing() -> Self {
        Self::error(StatusCode::NOT_FOUND, "no such path")
    }

    pub(super) fn busy() -> Self {
        let why = "too many requests at once; retry in a moment";
        Self::error(StatusCode::SERVICE_UNAVAILABLE, why)
    }

    pub(super) fn failed() -> Self {
        let why = "the operation was not completed";
        Self::error(StatusCode::INTERNAL_SERVER_ERROR, why)
    }

    pub(super) fn wrong_method(allow: &'static str) -> Self {
        Self {
            allow: Some(allow),
            ..Self::error(
                StatusCode::METHOD_NOT_ALLOWED,
                format!("this path supports {allow}"),
            )
        }
    }

    pub(super) fn into_response(self) -> Response<String> {
        let mut response = text("application/json", format!("{}\n", self.json));
        *response.status_mut() = self.status;
        if let Some(allow) = self.allow {
            response
                .headers_mut()
                .insert(ALLOW, HeaderValue::from_static(allow));
        }
        response
    }
}

/// A request to an operation.
#[derive(Debug)]
pub(super) struct ApiRequest {
    pub(super) method: Method,
    /// The path after `/api/v1/`, split at its slashes, each segment decoded.
    pub(super) path: Vec<String>,
    /// The query, decoded.
    query: Vec<(String, String)>,
    /// `null` without a body.
    pub(super) body: Value,
    /// The client's address.
    pub(super) from: IpAddr,
}

const PREFIX: &str = "/api/v1/";

/// Whether the API serves this path.
pub(super) fn is_for(path: &str) -> bool {
    path.starts_with("/api/")
}

impl AdminPages {
    /// Answers a request that has passed the access checks.
    pub(super) async fn call<B>(
        &self,
        request: Request<B>,
        from: IpAddr,
        connection: &AdminConnection,
    ) -> ApiResponse
    where
        B: Body<Data = Bytes>,
    {
        let (head, body) = request.into_parts();
        let call = match read(&head, body, from, connection).await {
            Ok(call) => call,
            Err(answer) => return answer,
        };
        if matches!(call.path.as_slice(), [path] if path == "reload") {
            return match connection.work(&self.inner.connections.reloads) {
                Some(_permit) => self.reload(&call).await,
                None => ApiResponse::busy(),
            };
        }
        let admin = self.clone();
        let performed = connection.in_turn(move || admin.perform(&call)).await;
        performed.unwrap_or_else(ApiResponse::failed)
    }

    async fn reload(&self, call: &ApiRequest) -> ApiResponse {
        if call.method != Method::POST {
            return ApiResponse::wrong_method("POST");
        }
        match call.takes(&[]) {
            Ok(()) => {
                let why = format!("requested by {}", call.from);
                reload::reload(&self.reloads, why).await
            }
            Err(answer) => answer,
        }
    }

    fn perform(&self, call: &ApiRequest) -> ApiResponse {
        let path: Vec<&str> = call.path.iter().map(String::as_str).collect();
        match (path.as_slice(), &call.method) {
            (["config"], &Method::GET | &Method::HEAD) => self.config(),
            (["config"], _) => ApiResponse::wrong_method("GET"),
            (["status"], _) => self.status(call),
            (["limits", rest @ ..], _) => self.limits(rest, call),
            (["kill"], _) => self.kill(call),
            (["decisions", rest @ ..], _) => self.decisions(rest, call),
            (["explain"], _) => self.explain(call),
            _ => ApiResponse::nothing(),
        }
    }
}

impl AdminPages {
    /// The running configuration as written: `${NAME}` unresolved, passwords removed.
    fn config(&self) -> ApiResponse {
        let active = self.inner.current.active();
        let snapshot = active.snapshot();
        let files: Vec<_> = snapshot.written.files.keys().collect();
        ApiResponse::ok(json!({
            "hash": snapshot.hash,
            "version": env!("CARGO_PKG_VERSION"),
            "files": files,
            "config": snapshot.written.redacted(),
        }))
    }
}

impl ApiRequest {
    /// The value of a query parameter.
    pub(super) fn query(&self, name: &str) -> Option<&str> {
        let found = self.query.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// Rejects a body with unknown keys, since a misspelled key would otherwise be ignored.
    pub(super) fn takes(&self, keys: &[&str]) -> Result<(), ApiResponse> {
        let known = match &self.body {
            Value::Null => true,
            Value::Object(fields) => fields.keys().all(|key| keys.contains(&key.as_str())),
            _ => false,
        };
        if known {
            return Ok(());
        }
        let why = match keys.is_empty() {
            true => "this operation takes an empty body, or {}".to_owned(),
            false => format!(
                "the body must be a JSON object with no keys except {}",
                keys.join(", ")
            ),
        };
        Err(ApiResponse::error(StatusCode::BAD_REQUEST, why))
    }
}

/// Parses the request for an operation.
async fn read<B>(
    head: &Parts,
    body: B,
    from: IpAddr,
    connection: &AdminConnection,
) -> Result<ApiRequest, ApiResponse>
where
    B: Body<Data = Bytes>,
{
    let bad = |why: &str| ApiResponse::error(StatusCode::BAD_REQUEST, why);
    let rest = head.uri.path().strip_prefix(PREFIX);
    let rest = rest.ok_or_else(ApiResponse::nothing)?;
    let path = rest.split('/').map(decode).collect::<Option<Vec<_>>>();
    let path = path.ok_or_else(|| bad("the path has a malformed percent-escape"))?;
    let query = head.uri.query().unwrap_or_default().split('&');
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        Some((decode(name)?, decode(&value.replace('+', "%20"))?))
    };
    let query = query.map(pair).collect::<Option<Vec<_>>>();
    let query = query.ok_or_else(|| bad("the query has a malformed percent-escape"))?;
    let changes = !matches!(head.method, Method::GET | Method::HEAD);
    if changes {
        refuse_pages(&head.headers)?;
    }
    let held = connection.body(body, BODY_MAX_BYTES).await;
    let held = held.map_err(|none| match none {
        NoBody::NoRoom => ApiResponse::busy(),
        NoBody::TooLong | NoBody::Broken => {
            let why = format!("the body is incomplete or longer than {BODY_MAX_BYTES} bytes");
            ApiResponse::error(StatusCode::PAYLOAD_TOO_LARGE, why)
        }
    })?;
    let body = match held.bytes.is_empty() {
        true => Value::Null,
        false if !is_json(&head.headers) => {
            let why = "send the body with content-type: application/json";
            return Err(ApiResponse::error(StatusCode::UNSUPPORTED_MEDIA_TYPE, why));
        }
        false => serde_json::from_slice(&held.bytes)
            .map_err(|error| bad(&format!("the body is not JSON: {error}")))?,
    };
    Ok(ApiRequest {
        method: head.method.clone(),
        path,
        query,
        body,
        from,
    })
}

/// Rejects changes from other sites. Browsers send `Origin` with every POST, PUT and DELETE, and
/// `Sec-Fetch-Site`. Only the gateway's own page may make changes, and it sends JSON.
fn refuse_pages(headers: &HeaderMap) -> Result<(), ApiResponse> {
    let site = headers.get("sec-fetch-site").map(HeaderValue::as_bytes);
    let own = |origin: &HeaderValue| {
        let host = headers.get(http::header::HOST).map(HeaderValue::as_bytes);
        let (_, authority) = origin.to_str().ok()?.split_once("://")?;
        Some(Some(authority.as_bytes()) == host)
    };
    let foreign = site.is_some_and(|site| site != b"same-origin" && site != b"none")
        || headers
            .get(ORIGIN)
            .is_some_and(|origin| own(origin) != Some(true));
    let from_browser = site.is_some() || headers.contains_key(ORIGIN);
    if foreign || from_browser && !is_json(headers) {
        let why = "pages of other sites may not make changes here";
        return Err(ApiResponse::error(StatusCode::FORBIDDEN, why));
    }
    Ok(())
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers
        .get(CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok());
    let essence = kind
        .and_then(|kind| kind.split(';').next())
        .unwrap_or_default();
    essence.trim().eq_ignore_ascii_case("application/json")
}

/// Percent-decodes a path segment; `None` if an escape is malformed or the result is not UTF-8.
fn decode(part: &str) -> Option<String> {
    let mut bytes = part.bytes();
    let mut decoded = Vec::with_capacity(part.len());
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            decoded.push(byte);
            continue;
        }
        let mut digit = || char::from(bytes.next()?).to_digit(16);
        let (high, low) = (digit()?, digit()?);
        decoded.push(u8::try_from(high * 16 + low).ok()?);
    }
    String::from_utf8(decoded).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let field = |&(name, value)| {
            let name = http::HeaderName::from_static(name);
            (name, HeaderValue::from_static(value))
        };
        fields.iter().map(field).collect()
    }

    #[test]
    fn a_page_of_another_site_changes_nothing_even_with_what_it_can_send_unasked() {
        let curl = headers(&[("host", "127.0.0.1:9901")]);
        assert!(refuse_pages(&curl).is_ok(), "no browser");
        let ours = [
            ("host", "127.0.0.1:9901"),
            ("origin", "http://127.0.0.1:9901"),
            ("sec-fetch-site", "same-origin"),
            ("content-type", "application/json"),
        ];
        assert!(refuse_pages(&headers(&ours)).is_ok(), "our own page");
        for foreign in [
            &[("origin", "https://evil.example")][..],
            &[("origin", "null")],
            &[("sec-fetch-site", "cross-site")],
            &[
                ("sec-fetch-site", "same-site"),
                ("content-type", "application/json"),
            ],
            &[("sec-fetch-site", "same-origin")],
        ] {
            let mut fields = headers(foreign);
            fields.insert("host", HeaderValue::from_static("127.0.0.1:9901"));
            assert!(refuse_pages(&fields).is_err(), "{foreign:?}");
        }
    }

    #[test]
    fn a_part_of_a_path_may_hold_any_text() {
        assert_eq!(
            decode("ip=2001:db8::%2F64").as_deref(),
            Some("ip=2001:db8::/64")
        );
        assert_eq!(decode("user=a%20b%2C").as_deref(), Some("user=a b,"));
        assert_eq!(decode("100%"), None);
        assert_eq!(decode("%zz"), None);
        assert_eq!(decode("%ff"), None);
    }
}
