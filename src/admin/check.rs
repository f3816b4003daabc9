//! `/check`: forward-auth for another proxy that serves the request itself (nginx's `auth_request`,
//! Caddy's `forward_auth`, Traefik's `ForwardAuth`, Envoy's `ext_authz`).
//!
//! **Access.** Trusted proxies only, by their connecting address: the peer names the client, and so
//! the quota to spend. No token is required, since `Authorization` belongs to the client here. Nor
//! is a loopback `Host`, since proxies forward the client's.
//!
//! **Identity headers** are ignored unless `[admin] check_identity_from` names the peer. A proxy
//! forwards client fields, so a header that names a user (`[[user]] from = "header"`) is only the
//! client's claim. Trusting a proxy's `X-Forwarded-For` does not imply trust in that.
//!
//! **The request.** The client's fields, plus the method and target under the names that proxies
//! use. If two names carry the same information, they must agree. Otherwise a proxy that sets one
//! name and forwards the client's other one would let the client choose its route.

use std::{mem, net::IpAddr, sync::atomic::Ordering::Relaxed};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri,
    header::{CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, TRAILER},
    request::Parts,
    uri::PathAndQuery,
};
use http_body::Body;

use super::{
    api_response::ApiResponse,
    connections::{AdminConnection, NoBody},
    pages::AdminPages,
};
use crate::{
    gateway::{
        check::ForwardAuth,
        described::{Described, DescribedBody},
    },
    identity::UserSource,
    upstream::field_rules,
};

const PATH: &str = "/check";

/// Fields of a longer body count as unclear, as on a listener.
const BODY_MAX_BYTES: usize = 256 * 1024;

/// Names of the method field: first that of Traefik and Caddy, then that of the nginx recipes.
const METHOD: [&str; 2] = ["x-forwarded-method", "x-original-method"];
const TARGET: [&str; 3] = ["x-forwarded-uri", "x-original-uri", "x-original-url"];
const FORWARDED_HOST: &str = "x-forwarded-host";

/// Carries a status that `auth_request` cannot forward.
const STATUS: HeaderName = HeaderName::from_static("x-ratelimit-status");

/// Whether `/check` serves this path. Envoy appends the path of the request.
pub(super) fn is_for(path: &str) -> bool {
    path.strip_prefix(PATH)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

impl AdminPages {
    pub(super) async fn check<B>(
        &self,
        request: Request<B>,
        peer: IpAddr,
        connection: &AdminConnection,
    ) -> Response<String>
    where
        B: Body<Data = Bytes>,
    {
        let uri = request.uri();
        let for_nginx = uri.path() == PATH && uri.query() == Some("style=nginx");
        let response = match self.verdict(request, peer, connection).await {
            // all bodies of the gateway are UTF-8
            Ok(response) => response.map(|body| String::from_utf8_lossy(&body).into_owned()),
            Err(answer) => answer.into_response(),
        };
        match for_nginx {
            true => as_nginx_takes_it(response),
            false => response,
        }
    }

    async fn verdict<B>(
        &self,
        request: Request<B>,
        peer: IpAddr,
        connection: &AdminConnection,
    ) -> Result<Response<Bytes>, ApiResponse>
    where
        B: Body<Data = Bytes>,
    {
        if !self.trusts(peer) {
            if !self.inner.told_of_stranger.swap(true, Relaxed) {
                tracing::warn!(%peer, "rejected /check from an untrusted peer (403); add it to [client_ip] trusted_proxies if it is yours");
            }
            let why = "only a trusted proxy may use /check";
            return Err(ApiResponse::error(StatusCode::FORBIDDEN, why));
        }
        let (mut head, body) = request.into_parts();
        self.forget_identity(&mut head.headers, peer);
        let head =
            original(head).map_err(|why| ApiResponse::error(StatusCode::BAD_REQUEST, why))?;
        let (mut held, missing) = match connection.body(body, BODY_MAX_BYTES).await {
            Ok(held) => {
                let held = Some(held).filter(|held| !held.bytes.is_empty());
                (held, DescribedBody::Absent)
            }
            Err(NoBody::TooLong) => (None, DescribedBody::TooLong),
            Err(NoBody::Broken) => (None, DescribedBody::Broken),
            Err(NoBody::NoRoom) => return Err(self.busy()),
        };
        let permit = connection.work(&self.inner.connections.checks);
        let _permit = permit.ok_or_else(|| self.busy())?;
        let nobody = || {
            ApiResponse::error(
                StatusCode::SERVICE_UNAVAILABLE,
                "the gateway cannot decide now",
            )
        };
        let desk = self.forward_auth().ok_or_else(nobody)?;
        let described = Described {
            head,
            peer,
            certificate: None,
            // its share of the body memory is held until the end
            body: match &mut held {
                Some(held) => DescribedBody::Whole(mem::take(&mut held.bytes)),
                None => missing,
            },
        };
        let verdict = desk.ask(described).await;
        verdict.ok_or_else(nobody)
    }

    fn busy(&self) -> ApiResponse {
        if !self.inner.told_of_busy.swap(true, Relaxed) {
            tracing::warn!("too many concurrent requests to /check; some get 503");
        }
        ApiResponse::busy()
    }

    /// Removes the fields that name a user and a tier, unless this peer is trusted to have verified
    /// them.
    fn forget_identity(&self, headers: &mut HeaderMap, peer: IpAddr) {
        let active = self.inner.current.active();
        let snapshot = active.snapshot();
        let believed = &snapshot.admin.check_identity_from;
        if believed.contains(peer.to_canonical()) {
            return;
        }
        let mut forgotten = None;
        for source in &snapshot.identity.users {
            if let UserSource::Header {
                header,
                tier_header,
            } = source
            {
                for name in std::iter::once(header).chain(tier_header) {
                    forgotten = headers.remove(name).map(|_| name).or(forgotten);
                }
            }
        }
        if let Some(header) = forgotten
            && !self.inner.told_of_identity.swap(true, Relaxed)
        {
            tracing::warn!(%peer, %header, "a request to /check names its user in a header, which is ignored; let the proxy clear it, or \
                name the proxy in [admin] check_identity_from if it has verified the user");
        }
    }

    /// Whether a peer may name the client, by the same rule as on the listeners.
    fn trusts(&self, peer: IpAddr) -> bool {
        let active = self.inner.current.active();
        let listener = &active.snapshot().listeners[0];
        let trusted = listener.per_address.trusted.as_ref();
        trusted.is_none_or(|trusted| trusted.contains(peer.to_canonical()))
    }

    /// Started with the first request to `/check`: most gateways never receive one.
    fn forward_auth(&self) -> Option<&ForwardAuth> {
        let open = || {
            let opened = ForwardAuth::open(self.inner.current.clone());
            opened
                .inspect_err(|error| tracing::error!(%error, "forward-auth is unavailable: cannot start its thread"))
                .ok()
        };
        self.inner.desk.get_or_init(open).as_ref()
    }
}

/// `auth_request` knows 2xx, 401 and 403, and answers any other status with 500.
fn as_nginx_takes_it(mut response: Response<String>) -> Response<String> {
    let status = response.status();
    if !status.is_success() && status != StatusCode::UNAUTHORIZED {
        response
            .headers_mut()
            .insert(STATUS, status.as_u16().into());
        *response.status_mut() = StatusCode::FORBIDDEN;
    }
    response
}

/// Rebuilds the head of the request that the proxy received. The error addresses the proxy's
/// operator.
fn original(mut head: Parts) -> Result<Parts, String> {
    if let Some(method) = unambiguous(&head.headers, &METHOD)? {
        let method = Method::from_bytes(method.as_bytes());
        head.method = method.map_err(|_| format!("{} is not a method", METHOD[0]))?;
    }
    let (host, target) = target(&head)?;
    let host = match unambiguous(&head.headers, &[FORWARDED_HOST])?
        .cloned()
        .or(host)
    {
        Some(host) => host,
        None => unambiguous(&head.headers, &[HOST.as_str()])?
            .cloned()
            .ok_or("the host is missing")?,
    };
    head.uri = Uri::from(target);
    let headers = &mut head.headers;
    field_rules::remove_hop_by_hop(headers);
    // the proxy frames the body, if there is one
    for name in [&CONTENT_LENGTH, &EXPECT, &TRAILER] {
        headers.remove(name);
    }
    for name in METHOD.iter().chain(&TARGET) {
        headers.remove(*name);
    }
    // a gRPC call is refused with status 200, which a proxy would take for permission
    let kind = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    if kind.is_some_and(|kind| kind.to_ascii_lowercase().starts_with(b"application/grpc")) {
        headers.remove(CONTENT_TYPE);
    }
    headers.insert(HOST, host);
    Ok(head)
}

/// The requested authority, if given, and the target.
fn target(head: &Parts) -> Result<(Option<HeaderValue>, PathAndQuery), String> {
    let Some(written) = unambiguous(&head.headers, &TARGET)? else {
        let own = head.uri.path_and_query().map_or("", PathAndQuery::as_str);
        let behind = own.strip_prefix(PATH).filter(|rest| rest.starts_with('/'));
        let behind = behind
            .ok_or_else(|| format!("{} is missing: it carries the request target", TARGET[0]))?;
        let target = PathAndQuery::try_from(behind);
        return Ok((None, target.map_err(|error| error.to_string())?));
    };
    let uri = Uri::try_from(written.as_bytes());
    let uri = uri.map_err(|error| format!("{}: {error}", TARGET[0]))?;
    let host = uri.authority().map(|host| host.as_str());
    let host = host.and_then(|host| HeaderValue::from_str(host).ok());
    let target = uri.into_parts().path_and_query;
    let target = target.ok_or_else(|| format!("{} has no path", TARGET[0]))?;
    if target.as_str().starts_with('?') {
        // an empty path is the root
        let target = PathAndQuery::try_from(target.to_string());
        return Ok((host, target.map_err(|error| error.to_string())?));
    }
    Ok((host, target))
}

/// The value under these names: present once, or equal.
fn unambiguous<'a>(
    headers: &'a HeaderMap,
    names: &[&str],
) -> Result<Option<&'a HeaderValue>, String> {
    let mut values = names.iter().flat_map(|name| headers.get_all(*name));
    let first = values.next();
    match values.all(|other| Some(other) == first) {
        true => Ok(first),
        false => Err(format!("{} differ", names.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn original_of(uri: &str, fields: &[(&str, &str)]) -> Result<String, String> {
        let mut request = Request::builder().uri(uri).header("host", "edge:9901");
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let (head, ()) = request.body(()).expect("it is a request").into_parts();
        let head = original(head)?;
        let host = head.headers[HOST].to_str().expect("text").to_owned();
        Ok(format!("{} {host} {}", head.method, head.uri))
    }

    #[test]
    fn each_proxy_says_in_its_own_way_what_the_request_was() {
        let uri = ("x-forwarded-uri", "/a?b=c");
        for (path, fields, expected) in [
            // Traefik
            (
                "/check",
                &[
                    ("x-forwarded-method", "PUT"),
                    ("x-forwarded-host", "shop.example"),
                    uri,
                ][..],
                "PUT shop.example /a?b=c",
            ),
            // Caddy sends the client's host as its own
            ("/check", &[uri], "GET edge:9901 /a?b=c"),
            // nginx
            (
                "/check?style=nginx",
                &[("x-original-method", "DELETE"), ("x-original-uri", "/d")],
                "DELETE edge:9901 /d",
            ),
            // ingress-nginx
            (
                "/check",
                &[("x-original-url", "https://shop.example:8443/a?b")],
                "GET shop.example:8443 /a?b",
            ),
            // Envoy, with path_prefix
            (
                "/check/a/b?style=nginx",
                &[],
                "GET edge:9901 /a/b?style=nginx",
            ),
        ] {
            assert_eq!(
                original_of(path, fields).as_deref(),
                Ok(expected),
                "{fields:?}"
            );
        }
    }

    #[test]
    fn what_is_said_twice_is_said_alike_or_the_client_could_choose() {
        let names = [("x-forwarded-uri", "/cheap"), ("x-original-uri", "/dear")];
        assert!(original_of("/check", &names).is_err());
        assert!(
            original_of(
                "/check",
                &[("x-forwarded-uri", "/a"), ("x-forwarded-uri", "/b")]
            )
            .is_err()
        );
        let alike = [("x-forwarded-uri", "/a"), ("x-original-uri", "/a")];
        assert!(original_of("/check", &alike).is_ok());
        let hosts = [
            ("x-forwarded-uri", "/a"),
            ("x-forwarded-host", "a"),
            ("x-forwarded-host", "b"),
        ];
        assert!(original_of("/check", &hosts).is_err());
    }

    #[test]
    fn what_is_not_said_or_cannot_be_is_an_error() {
        assert!(
            original_of("/check", &[]).is_err_and(|why| why.contains("x-forwarded-uri is missing"))
        );
        assert!(original_of("/check", &[("x-forwarded-uri", "a b")]).is_err());
        assert!(
            original_of(
                "/check",
                &[("x-forwarded-uri", "/"), ("x-forwarded-method", "G T")]
            )
            .is_err()
        );
    }

    #[test]
    fn only_paths_of_its_own_are_answered() {
        assert!(is_for("/check") && is_for("/check/a"));
        assert!(!is_for("/checks") && !is_for("/api/v1/check"));
    }
}
