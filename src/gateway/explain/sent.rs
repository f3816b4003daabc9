//! The upstream's view of an explained request.

use bytes::BytesMut;
use http::HeaderMap;

use super::report::Forwarded;
use crate::{
    gateway::{
        answer, request_context::RequestContext, request_context::UpstreamTarget, worker::Worker,
    },
    upstream::{
        BodyFraming,
        headers::{self, Outbound},
    },
};

impl Worker {
    /// Describes the forwarded request from the exact bytes that the upstream would receive.
    pub(super) fn sent_on(
        &self,
        request: &RequestContext<'_>,
        target: &UpstreamTarget<'_>,
        body: Option<&[u8]>,
    ) -> Option<Forwarded> {
        if answer::has_via(&request.head.headers, &self.active.process.pseudonym) {
            return None;
        }
        let framing = match body {
            Some(body) => BodyFraming::Length(body.len() as u64),
            None => BodyFraming::None,
        };
        let outbound = self.outbound(request, target, framing)?;
        let upstream = &self.upstreams[request.decision.route.upstream];
        let settings = upstream.state().settings();
        let host = upstream.first_host(outbound.host);
        let mut head = BytesMut::new();
        headers::write_head(&mut head, &outbound, host);
        let (sets, removes) = compare(&request.head.headers, &head, &outbound);
        Some(Forwarded {
            upstream: settings.name.clone(),
            servers: settings.servers.iter().map(ToString::to_string).collect(),
            delay: request.decision.delay,
            sets,
            removes,
        })
    }
}

/// Compares heads: the fields that we set or changed, and the client fields that we removed.
fn compare(
    inbound: &HeaderMap,
    head: &[u8],
    outbound: &Outbound<'_>,
) -> (Vec<(String, String)>, Vec<String>) {
    /// Fields whose values are ours or addresses, and so hold no secret.
    const SHOWN: [&str; 14] = [
        "host",
        "x-forwarded-for",
        "x-forwarded-proto",
        "x-forwarded-host",
        "x-request-id",
        "x-user-id",
        "x-rate-limit-tier",
        "x-request-priority",
        "x-ratelimit-over",
        "via",
        "content-length",
        "transfer-encoding",
        "te",
        "connection",
    ];
    let lines = head.split(|&byte| byte == b'\n').skip(1);
    let fields: Vec<(&str, &[u8])> = lines
        .filter_map(|line| {
            let colon = line.iter().position(|&byte| byte == b':')?;
            Some((
                str::from_utf8(&line[..colon]).ok()?,
                line[colon + 1..].trim_ascii(),
            ))
        })
        .collect();
    let came = |name: &str, value: &[u8]| {
        let mut lines = inbound.get_all(name).iter();
        lines.any(|line| line.as_bytes().trim_ascii() == value)
    };
    let shown = |name: &str, value: &[u8]| {
        if name == "x-request-id" {
            return "(a new one for each request)".to_owned();
        }
        if !SHOWN.contains(&name) {
            return "…".to_owned();
        }
        // Hide our name in `Via`: it differs in each process.
        let value = value.escape_ascii().to_string();
        value.replace(outbound.pseudonym, "tidegate-…")
    };
    let sets = fields
        .iter()
        .filter(|(name, value)| !came(name, value))
        .map(|(name, value)| ((*name).to_owned(), shown(name, value)))
        .collect();
    let gone = inbound
        .keys()
        .filter(|name| !fields.iter().any(|(sent, _)| name == sent));
    (sets, gone.map(ToString::to_string).collect())
}
