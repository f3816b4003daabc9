//! Header fields that tell a client about its limits.
//!
//! | family | fields | value |
//! |---|---|---|
//! | `ratelimit` | `RateLimit`, `RateLimit-Policy` | every limit that applies, the binding one first |
//! | `ratelimit_triple` | `RateLimit-Limit`, `-Remaining`, `-Reset` | the binding limit; reset in seconds from now |
//! | `x_ratelimit` | `X-RateLimit-Limit`, `-Remaining`, `-Reset` | the binding limit; reset in seconds since 1970 |
//!
//! `ratelimit` follows draft-ietf-httpapi-ratelimit-headers-11, called draft-11 below.
//!
//! Upstreams may send such fields for limits of their own. `RateLimit` and `RateLimit-Policy` are
//! lists, so tidegate keeps the upstream's members and adds its own on another line. A name that
//! the upstream uses becomes `gateway.NAME`. If the upstream's field is not a valid list, as in
//! older drafts, tidegate adds nothing, because the combined field would be malformed.
//!
//! The other two families hold a single value, and a client must not see two. So tidegate's fields
//! replace the upstream's, a whole family at a time. But if the upstream answers 429, its limit is
//! the binding one: its family stays, and tidegate omits its own.
//!
//! 3xx responses carry no fields: a client might wait before it follows `Location` (draft-11 §5).
//!
//! Values are slices of one buffer that each worker reuses. `BytesMut::split` returns a slice
//! without copying. Once all responses with slices are sent, `reserve` reuses the memory. One slice
//! keeps the whole buffer alive, so the buffer is small.

use std::time::{SystemTime, UNIX_EPOCH};

use arrayvec::ArrayVec;
use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header::RETRY_AFTER};

use super::{
    body,
    cost_terms::Sdk,
    head::authored_head,
    members::{self, ListField},
    policy::{
        INTEGER_MAX, LimitReport, NS_PER_SECOND, Policy, RejectedRequest, put_number, value_of,
    },
    request_facts::RequestFacts,
    sdk,
    settings::{BodyStyle, FieldFamilies, ResponseSettings},
};
use crate::limit::MAX_LIMITS;

/// Enough for dozens of responses before the buffer is reallocated.
const BUFFER_BYTES: usize = 8 * 1024;
/// Upper bound for the fields of three limits in every family, and for a body.
const ANSWER_BYTES: usize = 1024;

static RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
static RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
static TRIPLE: [HeaderName; 3] = [
    HeaderName::from_static("ratelimit-limit"),
    HeaderName::from_static("ratelimit-remaining"),
    HeaderName::from_static("ratelimit-reset"),
];
static X_TRIPLE: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit"),
    HeaderName::from_static("x-ratelimit-remaining"),
    HeaderName::from_static("x-ratelimit-reset"),
];

/// Prefix for a limit's name if the upstream uses the same name.
const OURS: &str = "gateway.";

/// Writes field values and rejection bodies into a reused buffer. One per worker.
#[derive(Debug)]
pub struct FieldWriter {
    buffer: BytesMut,
    /// Cached values of `RateLimit-Policy`, by the limits in display order. Requests of a route
    /// that the same limit binds have the same value.
    written: Vec<(Places, HeaderValue)>,
    /// Cached heads of rejections, with blanks, by the limits in display order.
    forms: Vec<(Rejection, HeaderMap)>,
}

/// Limits in display order, as the addresses of their policies, which outlive the writer.
type Places = ArrayVec<usize, MAX_LIMITS>;

/// Everything that a rejection's head depends on, apart from the blanks.
#[derive(Debug, PartialEq, Eq)]
struct Rejection {
    settings: ResponseSettings,
    has_id: bool,
    may_return: bool,
    places: Places,
}

/// Number of cached `RateLimit-Policy` values, and of cached heads.
const MAX_WRITTEN: usize = 8;

/// Placeholder for a value that differs between rejections.
const BLANK: HeaderValue = HeaderValue::from_static("");
/// Number of blanks in one head: request ID, `Retry-After`, and the values that change in each
/// family.
const MAX_BLANKS: usize = 7;

impl Default for FieldWriter {
    fn default() -> Self {
        FieldWriter::new()
    }
}

impl FieldWriter {
    /// A writer with an allocated buffer.
    pub fn new() -> FieldWriter {
        FieldWriter {
            buffer: BytesMut::with_capacity(BUFFER_BYTES),
            written: Vec::new(),
            forms: Vec::new(),
        }
    }

    /// Adds the configured fields to a response head: tidegate's own, or one from the upstream.
    ///
    /// `met` is in display order, the binding limit first. If it is empty, nothing is written.
    /// `now` is wall-clock time, for `X-RateLimit-Reset`.
    pub fn write(
        &mut self,
        headers: &mut HeaderMap,
        status: StatusCode,
        met: &[LimitReport<'_>],
        settings: &ResponseSettings,
        now: SystemTime,
    ) {
        let denied = met.iter().any(|met| met.denied);
        let Some(binding) = met.first().filter(|_| settings.on.shows(denied)) else {
            return;
        };
        if status.is_redirection() {
            return;
        }
        self.buffer.reserve(ANSWER_BYTES);
        let upstream_refused = status == StatusCode::TOO_MANY_REQUESTS && !denied;
        if settings.fields.ratelimit {
            self.list(headers, met);
        }
        for (names, reset) in families_of_three(settings, binding, now) {
            let is_theirs = |name| headers.contains_key(name);
            if !(upstream_refused && names.iter().any(is_theirs)) {
                let [limit, remaining, at_reset] = names;
                headers.insert(limit, binding.policy.limit().clone());
                headers.insert(remaining, self.number(binding.remaining));
                headers.insert(at_reset, self.number(reset));
            }
        }
        if !upstream_refused {
            sdk::put_families(headers, met, settings, now);
        }
    }

    /// The head of a rejection. Clones a cached form and fills its blanks in order: cloning a
    /// header table costs a sixth of building one.
    pub(super) fn rejection(
        &mut self,
        denial: &RejectedRequest<'_>,
        asked: &RequestFacts<'_>,
        settings: &ResponseSettings,
        now: SystemTime,
    ) -> HeaderMap {
        self.buffer.reserve(ANSWER_BYTES);
        let denied = denial.violated().next().is_some();
        let met = match settings.on.shows(denied) {
            true => denial.met,
            false => &[],
        };
        let mut values = ArrayVec::<HeaderValue, MAX_BLANKS>::new();
        values.extend(asked.request_id.cloned());
        values.extend(
            denial
                .retry_after()
                .map(|wait| self.number(u64::from(wait))),
        );
        if let Some(binding) = met.first() {
            if settings.fields.ratelimit {
                values.push(self.standings(met, &[]));
            }
            for (_, reset) in families_of_three(settings, binding, now) {
                values.push(self.number(binding.remaining));
                values.push(self.number(reset));
            }
        }
        let mut head = self.form(denial, asked, settings, met).clone();
        let blanks = head.values_mut().filter(|value| value.is_empty());
        blanks.zip(values).for_each(|(blank, value)| *blank = value);
        sdk::put_families(&mut head, met, settings, now);
        head
    }

    /// The cached head for a rejection by these limits, with blanks.
    fn form(
        &mut self,
        denial: &RejectedRequest<'_>,
        asked: &RequestFacts<'_>,
        settings: &ResponseSettings,
        met: &[LimitReport<'_>],
    ) -> &HeaderMap {
        let (has_id, may_return) = (asked.request_id.is_some(), denial.retry_after().is_some());
        let known = self.forms.iter().position(|(known, _)| {
            known.settings == *settings
                && (known.has_id, known.may_return) == (has_id, may_return)
                && are_at(met, &known.places)
        });
        let at = known.unwrap_or_else(|| {
            let mut head = authored_head(settings.body, asked.request_id.map(|_| BLANK));
            if may_return {
                head.insert(RETRY_AFTER, BLANK);
            }
            if let Some(binding) = met.first() {
                if settings.fields.ratelimit {
                    head.insert(&RATELIMIT_POLICY, self.policies(met, &[]));
                    head.insert(&RATELIMIT, BLANK);
                }
                for ([limit, remaining, at_reset], _) in
                    families_of_three(settings, binding, UNIX_EPOCH)
                {
                    head.insert(limit, binding.policy.limit().clone());
                    head.insert(remaining, BLANK);
                    head.insert(at_reset, BLANK);
                }
            }
            if self.forms.len() == MAX_WRITTEN {
                self.forms.clear();
            }
            let rejection = Rejection {
                settings: settings.clone(),
                has_id,
                may_return,
                places: places(met),
            };
            self.forms.push((rejection, head));
            self.forms.len() - 1
        });
        &self.forms[at].1
    }

    /// The body of a rejection. Also reserves room for the fields, because memory can be reused
    /// only while no slice is held.
    pub(super) fn body(
        &mut self,
        style: BodyStyle,
        denial: &RejectedRequest<'_>,
        asked: &RequestFacts<'_>,
    ) -> Bytes {
        self.buffer.reserve(2 * ANSWER_BYTES);
        body::put_denial(&mut self.buffer, style, denial, asked);
        self.buffer.split().freeze()
    }

    /// The body of a rejection in the form of a provider.
    pub(super) fn sdk_body(
        &mut self,
        sdk: Sdk,
        denial: &RejectedRequest<'_>,
        asked: &RequestFacts<'_>,
    ) -> Bytes {
        self.buffer.reserve(2 * ANSWER_BYTES);
        sdk::put_denial(&mut self.buffer, sdk, denial, asked);
        self.buffer.split().freeze()
    }

    /// A number as a header value.
    fn number(&mut self, number: u64) -> HeaderValue {
        if number == 0 {
            // the remaining units of nearly every rejected client
            return const { HeaderValue::from_static("0") };
        }
        put_number(&mut self.buffer, number.min(INTEGER_MAX));
        self.value()
    }

    /// Appends the two list fields after the upstream's own members.
    fn list(&mut self, headers: &mut HeaderMap, met: &[LimitReport<'_>]) {
        let fields = [
            (&RATELIMIT_POLICY, ListField::Policies),
            (&RATELIMIT, ListField::Standings),
        ];
        // upstreams rarely send either: one pass over the names is faster than two lookups
        let is_theirs = |name: &HeaderName| *name == RATELIMIT || *name == RATELIMIT_POLICY;
        if !headers.keys().any(is_theirs) {
            headers.append(&RATELIMIT_POLICY, self.policies(met, &[]));
            headers.append(&RATELIMIT, self.standings(met, &[]));
            return;
        }
        let theirs = fields.map(|(name, listed)| match headers.contains_key(name) {
            true => members::names(listed, &headers.get_all(name)),
            false => Some(Vec::new()),
        });
        let taken: Vec<String> = theirs.iter().flatten().flatten().cloned().collect();
        if theirs[0].is_some() {
            headers.append(&RATELIMIT_POLICY, self.policies(met, &taken));
        }
        if theirs[1].is_some() {
            headers.append(&RATELIMIT, self.standings(met, &taken));
        }
    }

    fn policies(&mut self, met: &[LimitReport<'_>], taken: &[String]) -> HeaderValue {
        if let ([only], []) = (met, taken) {
            return only.policy.member().clone();
        }
        if !taken.is_empty() {
            return self.policies_beside(met, taken);
        }
        let mut written = self.written.iter();
        let known = written.find(|(places, _)| are_at(met, places));
        if let Some((_, value)) = known {
            return value.clone();
        }
        // copied, because a cached slice would keep the whole buffer alive
        let value = self.policies_beside(met, taken);
        let value = HeaderValue::from_bytes(value.as_bytes()).unwrap_or(value);
        if self.written.len() == MAX_WRITTEN {
            self.written.clear();
        }
        self.written.push((places(met), value.clone()));
        value
    }

    fn policies_beside(&mut self, met: &[LimitReport<'_>], taken: &[String]) -> HeaderValue {
        for (at, met) in met.iter().enumerate() {
            self.separate(at);
            self.name(met.policy, taken);
            let (_, parameters) = met.policy.name_and_parameters();
            self.buffer.put_slice(parameters);
        }
        self.value()
    }

    fn standings(&mut self, met: &[LimitReport<'_>], taken: &[String]) -> HeaderValue {
        for (at, met) in met.iter().enumerate() {
            self.separate(at);
            match taken {
                [] => self.buffer.put_slice(met.policy.remains()),
                _ => {
                    self.name(met.policy, taken);
                    self.buffer.put_slice(b";r=");
                }
            }
            put_number(&mut self.buffer, met.remaining.min(INTEGER_MAX));
            if let Some(window) = met.effective_window() {
                self.buffer.put_slice(b";t=");
                put_number(&mut self.buffer, window);
            }
        }
        self.value()
    }

    /// The quoted name of a limit, made distinct from the upstream's names.
    fn name(&mut self, policy: &Policy, taken: &[String]) {
        self.buffer.put_u8(b'"');
        for _ in 0..clashes(policy, taken) {
            self.buffer.put_slice(OURS.as_bytes());
        }
        let (quoted, _) = policy.name_and_parameters();
        self.buffer.put_slice(&quoted[1..]);
    }

    fn separate(&mut self, at: usize) {
        if at > 0 {
            self.buffer.put_slice(b", ");
        }
    }

    fn value(&mut self) -> HeaderValue {
        value_of(self.buffer.split().freeze())
    }
}

/// How many times [`OURS`] must precede the limit's name to make it distinct.
fn clashes(policy: &Policy, taken: &[String]) -> usize {
    let is_taken = |clashes: &usize| {
        let ours = OURS.repeat(*clashes);
        taken
            .iter()
            .any(|name| name.strip_prefix(&*ours) == Some(policy.name()))
    };
    (0..=taken.len())
        .find(|clashes| !is_taken(clashes))
        .unwrap_or(0)
}

/// The configured three-field families, each with its reset: seconds from now, or since 1970.
fn families_of_three(
    settings: &ResponseSettings,
    binding: &LimitReport<'_>,
    now: SystemTime,
) -> impl Iterator<Item = (&'static [HeaderName; 3], u64)> {
    let FieldFamilies {
        ratelimit_triple,
        x_ratelimit,
        ..
    } = settings.fields;
    let reset_ns = binding.reset_ns;
    let from_now = ratelimit_triple.then(|| (&TRIPLE, reset_ns.div_ceil(NS_PER_SECOND)));
    let since_1970 = x_ratelimit.then(|| {
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let since_second = u64::from(now.subsec_nanos()).saturating_add(reset_ns);
        let seconds = since_second.div_ceil(NS_PER_SECOND);
        (&X_TRIPLE, now.as_secs().saturating_add(seconds))
    });
    from_now.into_iter().chain(since_1970)
}

fn places(met: &[LimitReport<'_>]) -> Places {
    let in_order = met.iter().take(MAX_LIMITS);
    in_order.map(|met| address_of(met.policy)).collect()
}

fn are_at(met: &[LimitReport<'_>], places: &Places) -> bool {
    let in_order = met.iter().map(|met| address_of(met.policy));
    in_order.eq(places.iter().copied())
}

fn address_of(policy: &Policy) -> usize {
    std::ptr::from_ref(policy).addr()
}

#[cfg(test)]
mod tests;
