//! A request to an operation of the API: read, bounded, and refused if a web page of another site
//! sent it.

use std::net::IpAddr;

use bytes::Bytes;
use http::{
    HeaderMap, HeaderValue, Method, StatusCode,
    header::{CONTENT_TYPE, ORIGIN},
    request::Parts,
};
use http_body::Body;
use serde_json::Value;

use super::{
    api_response::ApiResponse,
    connections::{AdminConnection, NoBody},
};

/// Most bytes of a request body.
const BODY_MAX_BYTES: usize = 64 * 1024;

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
pub(super) async fn read<B>(
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
