//! Rules for fields that both directions share: which are hop-by-hop (RFC 9110 §7.6.1), and which are
//! allowed in trailers (§6.5.1).

use http::{
    HeaderMap, HeaderName,
    header::{
        CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, HOST, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
        VIA,
    },
};

static KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
static PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
static PROXY_AUTHENTICATE: HeaderName = HeaderName::from_static("proxy-authenticate");
static PROXY_AUTHORIZATION: HeaderName = HeaderName::from_static("proxy-authorization");
static HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");

/// Whether a field is hop-by-hop (RFC 9110 §7.6.1). Cheap for the common case.
pub fn is_hop_by_hop(name: &HeaderName) -> bool {
    matches!(name.as_str().len(), 2 | 7 | 10 | 14..=19)
        && (name == CONNECTION
            || name == TE
            || name == UPGRADE
            || name == KEEP_ALIVE
            || name == TRANSFER_ENCODING
            || name == PROXY_CONNECTION
            || name == PROXY_AUTHENTICATE
            || name == PROXY_AUTHORIZATION
            || name == HTTP2_SETTINGS)
}

/// Whether a field is allowed in trailers: none that frames, routes, authenticates or that the
/// gateway vouches for, nor any spelling that a server could take for it. The headers of configured
/// credentials are removed before: see
/// [`ManagedFields::forbids_trailer`](crate::identity::ManagedFields::forbids_trailer).
pub fn may_be_trailer(field: &HeaderName) -> bool {
    let name = field.as_str();
    if name.bytes().any(|byte| matches!(byte, b'_' | b'.')) {
        let folded = HeaderName::try_from(name.replace(['_', '.'], "-"));
        return folded.is_ok_and(|name| is_harmless_trailer(&name));
    }
    is_harmless_trailer(field)
}

fn is_harmless_trailer(name: &HeaderName) -> bool {
    let text = name.as_str();
    let forbidden = is_hop_by_hop(name)
        || [HOST, CONTENT_LENGTH, TRAILER, EXPECT, COOKIE, VIA].contains(name)
        || [
            "authorization",
            "set-cookie",
            "content-encoding",
            "content-type",
            "content-range",
            "cache-control",
            "age",
            "forwarded",
            "range",
            "traceparent",
            "tracestate",
            "x-method-override",
            "x-original-url",
            "x-real-ip",
            "x-rewrite-url",
        ]
        .contains(&text)
        || [
            "sec-websocket-",
            "x-forwarded-",
            "x-http-method",
            "x-request-",
            "x-user-",
            "x-rate",
            "ratelimit",
            "if-",
        ]
        .iter()
        .any(|prefix| text.starts_with(prefix));
    !forbidden
}

/// Keeps only the fields allowed in trailers.
pub(super) fn retain_trailers(trailers: &mut HeaderMap) {
    let forbidden: Vec<HeaderName> = trailers
        .keys()
        .filter(|name| !may_be_trailer(name))
        .cloned()
        .collect();
    for name in forbidden {
        trailers.remove(name);
    }
}

/// Whether a list-valued field contains this token, in any case.
pub fn lists_token(headers: &HeaderMap, name: &HeaderName, token: &str) -> bool {
    tokens(headers, name).any(|listed| listed.eq_ignore_ascii_case(token.as_bytes()))
}

fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a [u8]> {
    headers
        .get_all(name)
        .iter()
        .flat_map(|line| line.as_bytes().split(|&byte| byte == b','))
        .map(<[u8]>::trim_ascii)
}

/// Whether a field of a response is hop-by-hop. Cheap for the common case.
pub(super) fn is_hop_by_hop_in_responses(name: &HeaderName) -> bool {
    matches!(name.as_str().len(), 2 | 7 | 10 | 16 | 17) && OF_A_CONNECTION.contains(&name)
}

/// Hop-by-hop fields of responses.
static OF_A_CONNECTION: [&HeaderName; 6] = [
    &CONNECTION,
    &KEEP_ALIVE,
    &PROXY_CONNECTION,
    &TE,
    &TRANSFER_ENCODING,
    &UPGRADE,
];

/// Removes the hop-by-hop fields of a response.
pub fn remove_hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(CONNECTION) {
        let named: Vec<HeaderName> = tokens(headers, &CONNECTION)
            .filter(|token| {
                !token.eq_ignore_ascii_case(b"close") && !token.eq_ignore_ascii_case(b"keep-alive")
            })
            .filter_map(|token| HeaderName::from_bytes(token).ok())
            .filter(may_be_named)
            .collect();
        for name in named {
            headers.remove(name);
        }
    }
    for name in OF_A_CONNECTION {
        headers.remove(name);
    }
}

/// Whether `Connection` may name this field: it cannot remove a field that is always end-to-end
/// (RFC 9110 §7.6.1).
pub(super) fn may_be_named(name: &HeaderName) -> bool {
    ![HOST, CONTENT_LENGTH, COOKIE].contains(name)
        && !["authorization", "set-cookie", "cache-control"].contains(&name.as_str())
}
