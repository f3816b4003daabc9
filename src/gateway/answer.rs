//! What the client gets: the upstream's response with our fields, a denial, or a refusal; and what is noted of it.

use std::{
    cell::{Cell, RefCell},
    time::SystemTime,
};

use arrayvec::ArrayVec;
use bytes::{BufMut as _, Bytes, BytesMut};
use http::{
    HeaderMap, HeaderValue, Method, Response, StatusCode, Version,
    header::{CONNECTION, UPGRADE, VIA},
};
use http_body::Body as _;

use super::{
    Body, Exchange, Worker,
    body::Source,
    plan::LimitPlan,
    record::{self, Ours, Record},
};
use crate::{
    identity::{Client, Rejected},
    limit::{MAX_LIMITS, Standing, Standings},
    listener::{
        Peer,
        inbound::{InboundBody, InboundError},
        request::{self, Malformed},
    },
    response::{self, Denial, Met, Refusal, X_RATELIMIT_WARNING, X_REQUEST_ID},
    route::path::PathError,
    upstream::{self, Tunnel, UpstreamError},
};

impl upstream::headers::Hears for Peer {
    fn hear(&self, status: StatusCode, headers: &HeaderMap) -> bool {
        self.pass_on_interim(status, headers)
    }
}

/// Of so many decisions one is timed: taking the time twice costs as much as deciding.
const TIMED: u32 = 16;

impl Worker {
    /// The upstream's response, with the fields that describe the limits.
    pub(super) fn pass_on(
        &self,
        exchange: &Exchange<'_>,
        mut response: Response<Source>,
        mut record: Record,
    ) -> Response<Body> {
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return match response.body_mut().take_tunnel() {
                Some(tunnel) => self.switch(exchange, response, tunnel, record),
                None => self.refuse(exchange, &Refusal::UpstreamProtocol, Some(record)),
            };
        }
        if !response.body().request_was_sent() {
            exchange.from.leave_body_unread();
        }
        if let Some(unsent) = response.body_mut().unsent_mut() {
            // both sides talk: only when neither does, it ends, after the upstream's `body_timeout`
            unsent.may_pause();
        }
        self.describe(exchange, &mut response, &mut record);
        // in HTTP/1 there may be no room for trailers
        let is_http2 = exchange.head.version == Version::HTTP_2;
        let grpc = exchange.grpc.filter(|_| is_http2);
        response.map(|source| Body::recorded(source, record, grpc))
    }

    /// A 101: behind it the connection is the upstream's to talk over, and its slots are held until it ends.
    fn switch(
        &self,
        exchange: &Exchange<'_>,
        mut response: Response<Source>,
        mut tunnel: Tunnel,
        mut record: Record,
    ) -> Response<Body> {
        let headers = response.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        self.describe(exchange, &mut response, &mut record);
        exchange.from.hand_over(Box::new(move |client| {
            Box::pin(async move {
                let _open = record.open_tunnel();
                if let Err(ended) = tunnel.relay(client, |bytes| record.sent(bytes)).await {
                    tracing::debug!(%ended, "a tunnel ended early");
                    if let Some(custody) = record.custody() {
                        custody.keep(tunnel.abandon());
                    }
                }
            })
        }));
        response.map(|_| Body::authored(Bytes::new()))
    }

    /// Notes that there is an answer, and adds what we say to it.
    fn describe<B>(
        &self,
        exchange: &Exchange<'_>,
        response: &mut Response<B>,
        record: &mut Record,
    ) {
        let status = response.status();
        let headers = response.headers_mut();
        headers.insert(&X_REQUEST_ID, exchange.request_id.clone());
        if let Some(limit) = exchange.warning
            && let Ok(limit) = HeaderValue::from_str(limit)
        {
            headers.insert(&X_RATELIMIT_WARNING, limit);
        }
        let settings = &self.shared.plan.response;
        self.fields.borrow_mut().write(
            headers,
            status,
            &met(exchange, &exchange.verdict.standings()),
            settings,
            self.shared.wall_clock(exchange.decided_at),
        );
        record.answered(status);
        self.count_answer(exchange, status);
    }

    /// 429: a limit denies the request.
    pub(super) fn deny(&self, exchange: &Exchange<'_>) -> Response<Body> {
        let standings = exchange.verdict.standings();
        // what a limit that is not disclosed denies tells of no other limit either
        let met = if is_undisclosed(exchange) {
            ArrayVec::new()
        } else {
            met(exchange, &standings)
        };
        let denial = Denial::new(&met, self.return_after_ns(exchange, &standings));
        let settings = &self.shared.plan.response;
        let response = response::too_many_requests(
            &denial,
            &asked(exchange),
            settings,
            &mut self.fields.borrow_mut(),
            self.shared.wall_clock(exchange.decided_at),
        );
        let retry_after = denial.retry_after();
        let binding = standings
            .binding()
            .and_then(|index| exchange.met.get(index));
        if let Some((met, seconds)) = binding.zip(retry_after) {
            met.limit
                .rule
                .metrics
                .retry_after_seconds
                .record(f64::from(seconds));
        }
        record::note(
            self,
            exchange,
            // what it means: a gRPC call is told in a 200
            StatusCode::TOO_MANY_REQUESTS,
            response.body().len() as u64,
            Ours::Denied { retry_after },
        );
        response.map(Body::authored)
    }

    /// When a denied request may come back: the longest wait, and on top of it a random part of what the limits that deny it allow,
    /// so that clients who were stopped together do not return together.
    fn return_after_ns(&self, exchange: &Exchange<'_>, standings: &Standings) -> Option<u64> {
        let wait_ns = standings.denial()?.retry_after_ns?;
        let denying = exchange.met.iter().zip(standings.iter());
        let jitter = denying
            .filter(|(_, standing)| standing.denied)
            .map(|(met, _)| met.limit.rule.settings.retry_jitter)
            .max()?;
        if jitter.ppm() == 0 {
            return Some(wait_ns);
        }
        let most = u128::from(wait_ns) * u128::from(jitter.ppm()) / 1_000_000;
        let part = (most * u128::from(self.request_ids.draw())) >> 64;
        Some(wait_ns.saturating_add(u64::try_from(part).unwrap_or(u64::MAX)))
    }

    /// Whatever else is not served; with the record of it, where it was sent on.
    pub(super) fn refuse(
        &self,
        exchange: &Exchange<'_>,
        refusal: &Refusal,
        record: Option<Record>,
    ) -> Response<Body> {
        let settings = &self.shared.plan.response;
        let asked = asked(exchange);
        let mut response = response::refuse(refusal, &asked, settings.body);
        let status = refusal.status();
        if asked.grpc.is_none() {
            self.fields.borrow_mut().write(
                response.headers_mut(),
                status,
                &met(exchange, &exchange.verdict.standings()),
                settings,
                self.shared.wall_clock(exchange.decided_at),
            );
        }
        self.count_answer(exchange, status);
        match record {
            Some(mut record) => {
                record.refused(refusal);
                response.map(|body| Body::recorded(Source::authored(body), record, None))
            }
            None => {
                let (bytes, ours) = (response.body().len() as u64, Ours::Refused(refusal.slug()));
                record::note(self, exchange, status, bytes, ours);
                response.map(Body::authored)
            }
        }
    }

    /// Counts what each limit decided.
    pub(super) fn note_decision(&self, exchange: &Exchange<'_>) {
        let admitted = exchange.verdict.admitted();
        for (met, finding) in exchange.met.iter().zip(exchange.verdict.iter()) {
            let decisions = &met.limit.decisions;
            if admitted && finding.delay_ns() > 0 {
                decisions.delayed.increment(1);
            } else if admitted {
                decisions.admitted.increment(1);
            } else if finding.denied() {
                decisions.rejected.increment(1);
                self.count_rejected(exchange, met);
            }
        }
        let count = self.decisions.get();
        self.decisions.set(count.wrapping_add(1));
        if count.is_multiple_of(TIMED) {
            self.shared
                .decision_seconds
                .record(exchange.arrived.elapsed());
        }
    }

    /// 401, counted by what was wrong.
    pub(super) fn unauthorized(&self, rejected: &Rejected) -> Refusal {
        self.shared.plan.count_rejected(rejected);
        Refusal::Unauthorized {
            challenge: rejected.challenge(),
        }
    }

    /// 502, 503 or 504; logged once a second for each upstream.
    pub(super) fn upstream_failed(
        &self,
        exchange: &Exchange<'_>,
        server: Option<usize>,
        error: &UpstreamError,
    ) -> Refusal {
        let index = exchange.route.upstream;
        let fleet = &self.shared.plan.upstreams[index];
        if let Some(unsaid) = self.warnings[index].speak() {
            let (upstream, kind) = (&fleet.settings().name, error.kind());
            let server = server.map(|server| fleet.server_name(server));
            let request_id = exchange.request_id.to_str().unwrap_or_default();
            tracing::warn!(upstream, server, kind, request_id, unsaid, %error, "the upstream gave no response");
        }
        match error {
            UpstreamError::Connect(_) | UpstreamError::Tls(_) | UpstreamError::Closed(_) => {
                Refusal::UpstreamUnreachable
            }
            UpstreamError::Busy(_) | UpstreamError::Refused(_) => Refusal::UpstreamBusy,
            UpstreamError::Timeout(_) => Refusal::UpstreamTimeout,
            UpstreamError::Protocol(_) => Refusal::UpstreamProtocol,
            UpstreamError::Broken(wait) => Refusal::UpstreamBroken {
                retry_after: u32::try_from(wait.as_millis().div_ceil(1_000).max(1))
                    .unwrap_or(u32::MAX),
            },
        }
    }
}

/// The limits that the request met and may know of, the binding one first.
pub(super) fn met<'a>(
    exchange: &'a Exchange<'_>,
    standings: &Standings,
) -> ArrayVec<Met<'a>, MAX_LIMITS> {
    let binding = standings.binding();
    let others = (0..exchange.met.len()).filter(|&index| Some(index) != binding);
    let in_order = binding.into_iter().chain(others);
    in_order
        .filter_map(|index| exchange.met.get(index).zip(standings.get(index)))
        .filter(|(met, _)| met.limit.rule.settings.disclose)
        .map(|(met, standing)| told(met, standing))
        .collect()
}

/// What a client is told of a limit that stands like this.
pub(super) fn told<'a>(met: &super::admit::Met<'a>, standing: &Standing) -> Met<'a> {
    let limit: &'a LimitPlan = met.limit;
    Met {
        policy: &limit.rule.policies[met.tier],
        remaining: standing.remaining,
        next_unit_ns: standing.next_unit_ns,
        reset_ns: standing.reset_ns,
        denied: standing.denied,
        never: standing.never,
        closed: met.blocked.is_some(),
    }
}

/// Whether a limit that clients may not know of denies the request.
fn is_undisclosed(exchange: &Exchange<'_>) -> bool {
    let mut denying = exchange.met.iter().zip(exchange.verdict.iter());
    denying.any(|(met, finding)| finding.denied() && !met.limit.rule.settings.disclose)
}

pub(super) fn asked<'a>(exchange: &'a Exchange<'_>) -> response::Asked<'a> {
    let head = exchange.head;
    response::Asked {
        is_head: head.method == Method::HEAD,
        version: head.version,
        request_id: Some(&exchange.request_id),
        grpc: exchange.grpc,
    }
}

/// The answer to a request whose body nobody will read: on HTTP/1 it says that the connection closes.
pub(super) fn leave_unread(
    body: &InboundBody,
    exchange: &Exchange<'_>,
    mut response: Response<Body>,
) -> Response<Body> {
    if !body.is_end_stream() && exchange.head.version < Version::HTTP_2 {
        exchange.from.leave_body_unread();
        response
            .headers_mut()
            .insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// The answer to a request that may have been followed by bytes that are not HTTP: a WebSocket was asked for and is refused
/// (RFC 9931 §4).
pub(super) fn refuse_upgrade(
    exchange: &Exchange<'_>,
    mut response: Response<Body>,
) -> Response<Body> {
    if exchange.may_upgrade
        && response.status() != StatusCode::SWITCHING_PROTOCOLS
        && request::asks_for_websocket(exchange.head)
    {
        let headers = response.headers_mut();
        let connection = match headers.contains_key(UPGRADE) {
            true => "close, upgrade",
            false => "close",
        };
        headers.insert(CONNECTION, HeaderValue::from_static(connection));
    }
    response
}

/// What a request that is not valid is told.
pub(super) fn malformed(malformed: Malformed) -> Refusal {
    match malformed {
        Malformed::Invalid(why) => Refusal::BadRequest(why),
        Malformed::TargetTooLong => Refusal::UriTooLong,
        Malformed::FieldsTooLarge => Refusal::HeadersTooLarge,
        Malformed::Tunnel => Refusal::NotImplemented("A gateway is not a tunnel."),
        Malformed::Trace => Refusal::MethodNotAllowed {
            allow: HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),
        },
        Malformed::CodingNotKnown => {
            Refusal::NotImplemented("The transfer coding is not known here.")
        }
    }
}

/// What a request is told whose path two parsers could read differently.
pub(super) fn bad_path(error: PathError) -> Refusal {
    Refusal::BadRequest(match error {
        PathError::NotOriginForm => "The path does not begin with a slash.",
        PathError::ForbiddenCharacter => "The target has a character that must be percent-encoded.",
        PathError::MalformedEscape => "The path has a malformed percent-escape.",
        PathError::ForbiddenEscape => {
            "The path has a percent-escape that servers read differently."
        }
        PathError::AboveRoot => "The path leaves the root.",
        PathError::DotWithParameter => "The path has a dot segment with a parameter.",
    })
}

/// What a client is told whose request body failed before there was a response.
pub(super) fn bad_body(error: &InboundError) -> Refusal {
    match error {
        InboundError::TooLarge(_) => Refusal::BodyTooLarge,
        InboundError::Silent(_) | InboundError::TooSlow(_) | InboundError::Late(_) => {
            Refusal::RequestTimeout
        }
        InboundError::NoRoom => Refusal::BodyBufferFull,
        InboundError::Broken(_) => {
            Refusal::BadRequest("The request body is not framed as its head announces.")
        }
        InboundError::Left(_) => Refusal::ClientLeft,
        InboundError::Cut(_) => Refusal::ConnectionCut,
    }
}

/// The request id that a trusted proxy sent, if it is one: short and visible.
pub(super) fn trusted_request_id(client: &Client<'_>, headers: &HeaderMap) -> Option<HeaderValue> {
    const MAX_BYTES: usize = 128;
    let theirs = client
        .peer_trusted
        .then(|| headers.get(&X_REQUEST_ID))
        .flatten()?;
    let fits = (1..=MAX_BYTES).contains(&theirs.len())
        && theirs.as_bytes().iter().all(u8::is_ascii_graphic);
    fits.then(|| theirs.clone())
}

/// Whether this very process has forwarded the request before.
pub(super) fn came_through(headers: &HeaderMap, pseudonym: &str) -> bool {
    let mut lines = headers.get_all(VIA).iter();
    lines.any(|line| {
        line.as_bytes()
            .windows(pseudonym.len())
            .any(|part| part == pseudonym.as_bytes())
    })
}

/// Ids for requests: a random start for each worker, then one after the other, mixed so that they look unrelated.
/// They are unique, not secret.
#[derive(Debug)]
pub(super) struct RequestIds {
    start: u64,
    /// `start`, as every id begins.
    prefix: [u8; 16],
    count: Cell<u64>,
    /// Ids are slices of it. One that is kept for long keeps all of it, so it is small.
    buffer: RefCell<BytesMut>,
}

/// Room for 32 ids.
const IDS_BYTES: usize = 1024;

impl RequestIds {
    pub(super) fn new() -> Self {
        let mut random = [0; 16];
        if getrandom::fill(&mut random).is_err() {
            // without entropy, the time of this worker's start tells it from others
            random = SystemTime::UNIX_EPOCH
                .elapsed()
                .unwrap_or_default()
                .as_nanos()
                .to_le_bytes();
        }
        let (start, count) = random.split_at(8);
        let number = |bytes: &[u8]| {
            bytes
                .iter()
                .fold(0, |number, &byte| number << 8 | u64::from(byte))
        };
        let start = number(start);
        Self {
            start,
            prefix: hexadecimal(start),
            count: Cell::new(number(count)),
            buffer: RefCell::default(),
        }
    }

    /// A number that no other worker has.
    pub(super) fn random(&self) -> u64 {
        mix(self.start ^ self.count.get())
    }

    /// Another number each time, as if drawn: for what nobody gains from guessing.
    pub(super) fn draw(&self) -> u64 {
        let count = self.count.get().wrapping_add(1);
        self.count.set(count);
        mix(mix(self.start) ^ count)
    }

    /// 32 hexadecimal digits.
    pub(super) fn next(&self) -> HeaderValue {
        let count = self.count.get().wrapping_add(1);
        self.count.set(count);
        let mut buffer = self.buffer.borrow_mut();
        if buffer.capacity() < 32 {
            buffer.reserve(IDS_BYTES);
        }
        buffer.put_slice(&self.prefix);
        buffer.put_slice(&hexadecimal(mix(count)));
        let id = HeaderValue::from_maybe_shared(buffer.split().freeze());
        id.unwrap_or(HeaderValue::from_static("0"))
    }
}

fn hexadecimal(number: u64) -> [u8; 16] {
    std::array::from_fn(|place| b"0123456789abcdef"[(number >> (60 - 4 * place)) as usize & 15])
}

/// The finaliser of SplitMix64: a bijection, so that distinct counts give distinct ids.
fn mix(count: u64) -> u64 {
    let count = (count ^ (count >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let count = (count ^ (count >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    count ^ (count >> 31)
}
