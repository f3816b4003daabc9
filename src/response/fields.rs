//! The fields that tell a client about its limits.
//!
//! | family | fields | value |
//! |---|---|---|
//! | `ratelimit` | `RateLimit`, `RateLimit-Policy` | every limit met, the binding one first (draft-ietf-httpapi-ratelimit-headers-11) |
//! | `ratelimit_triple` | `RateLimit-Limit`, `-Remaining`, `-Reset` | the binding limit; reset in seconds from now |
//! | `x_ratelimit` | `X-RateLimit-Limit`, `-Remaining`, `-Reset` | the binding limit; reset in seconds since 1970 |
//!
//! What an upstream says of its own limits: members of `RateLimit` and `RateLimit-Policy` are kept, ours follow on a line
//! of their own (both fields are lists), as `gateway.NAME` where the upstream uses the name itself. To a field that is no
//! such list (an older draft's) nothing is added: together they would be malformed for every client. The other two families
//! hold one value each, and a client must not see two: ours replace the upstream's, whole family by whole family. Only
//! where the upstream itself answers 429 its family stays and ours is left out, for then the upstream's limit is the
//! binding one.
//!
//! 3xx answers carry no fields: a client might wait before it follows `Location` (draft-11 §5).
//!
//! Values are slices of one buffer that each worker reuses. `BytesMut::split` hands out a slice without copying; once
//! the answers that hold slices have left, `reserve` takes the same memory again. A slice keeps the whole buffer
//! alive, so the buffer is small.

use std::time::{SystemTime, UNIX_EPOCH};

use arrayvec::ArrayVec;
use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header::RETRY_AFTER};

use super::{
    Asked, BodyStyle, FieldFamilies, Settings, authored_head, body,
    members::{self, Listed},
};
use crate::limit::{MAX_LIMITS, Quota};

/// The largest integer of a structured field (RFC 9651 §3.3.1).
const INTEGER_MAX: u64 = 999_999_999_999_999;
/// What every client can hold as seconds.
const RETRY_AFTER_MAX: u32 = 2_147_483_647;
const NS_PER_SECOND: u64 = 1_000_000_000;
/// One buffer serves dozens of answers before it is asked for again.
const BUFFER_BYTES: usize = 8 * 1024;
/// The fields of three limits in every family take less, and so does a body.
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

/// The name of a limit cannot be told to a client: only printable ASCII can (RFC 9651 §3.3.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the name of a limit is sent to clients: it must be printable ASCII, and not empty")]
pub struct BadPolicyName;

/// What can be said of a limit before any request: prepared once for each limit and tier.
#[derive(Clone, Debug)]
pub struct Policy {
    name: Box<str>,
    /// `per_ip (100/s, at most 200 at once)`.
    described: Box<str>,
    /// Both as they stand in a JSON string.
    in_json: [Box<[u8]>; 2],
    /// The most units at once.
    quota: u64,
    /// Seconds in which a spent quota is whole again, rounded up; `None` for slots, which no clock gives back.
    window: Option<u64>,
    refill: Refill,
    /// `200`.
    limit: HeaderValue,
    /// `"per_ip";q=200;w=2`.
    member: HeaderValue,
    /// The length of `"per_ip"` in `member`.
    name_bytes: usize,
    /// `"per_ip";r=`.
    remains: Box<[u8]>,
}

/// How what was spent comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refill {
    /// Unit by unit: a bucket, a window that slides.
    Gradual,
    /// At a moment that the next unit waits for: a window that begins anew, a log whose oldest entry leaves.
    AtOnce,
}

/// What goes before our name of a limit where the upstream has one of that name, too.
const OURS: &str = "gateway.";

impl Policy {
    /// Prepares what is said of the limit `name` with `quota`.
    pub fn compile(name: &str, quota: &Quota) -> Result<Policy, BadPolicyName> {
        let burst = quota.burst.get();
        let full_after_ns = u128::from(burst).saturating_mul(quota.period.as_nanos());
        let per_second = u128::from(quota.amount.get()) * u128::from(NS_PER_SECOND);
        let window = full_after_ns
            .div_ceil(per_second)
            .clamp(1, u128::from(INTEGER_MAX)) as u64;
        Policy::new(name, describe(name, quota), burst, Some(window))
    }

    /// The same of a limit that gives back all at once what was spent together: a fixed window, a log.
    pub fn of_window(name: &str, quota: &Quota) -> Result<Policy, BadPolicyName> {
        let refill = Refill::AtOnce;
        Ok(Policy {
            refill,
            ..Policy::compile(name, quota)?
        })
    }

    /// Prepares what is said of the limit `name` that lets so many requests be in flight.
    pub fn of_slots(name: &str, slots: u64) -> Result<Policy, BadPolicyName> {
        Policy::new(name, format!("{name} ({slots} at a time)"), slots, None)
    }

    fn new(
        name: &str,
        described: String,
        quota: u64,
        window: Option<u64>,
    ) -> Result<Policy, BadPolicyName> {
        if name.is_empty() || !name.bytes().all(|byte| (0x20..=0x7e).contains(&byte)) {
            return Err(BadPolicyName);
        }
        let mut text = BytesMut::with_capacity(name.len() + 48);
        text.put_u8(b'"');
        for byte in name.bytes() {
            if matches!(byte, b'"' | b'\\') {
                text.put_u8(b'\\');
            }
            text.put_u8(byte);
        }
        text.put_u8(b'"');
        let name_bytes = text.len();
        let remains = [&text, &b";r="[..]].concat().into();
        text.put_slice(b";q=");
        put_number(&mut text, quota.min(INTEGER_MAX));
        match window {
            Some(window) => {
                text.put_slice(b";w=");
                put_number(&mut text, window);
            }
            None => text.put_slice(b";qu=\"concurrent-requests\""),
        }
        Ok(Policy {
            in_json: [name, &described].map(body::escaped),
            name: name.into(),
            described: described.into(),
            quota,
            window,
            refill: Refill::Gradual,
            limit: HeaderValue::from(quota.min(INTEGER_MAX)),
            member: value_of(text.freeze()),
            name_bytes,
            remains,
        })
    }

    /// The limit's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The limit with its quota, for a sentence.
    pub(super) fn described(&self) -> &str {
        &self.described
    }

    /// The name, for a JSON string.
    pub(super) fn name_in_json(&self) -> &[u8] {
        &self.in_json[0]
    }

    /// The limit with its quota, for a sentence in a JSON string.
    pub(super) fn described_in_json(&self) -> &[u8] {
        &self.in_json[1]
    }

    /// The most units at once.
    pub(super) fn quota(&self) -> u64 {
        self.quota
    }

    /// Seconds in which a spent quota is whole again; `None` for slots.
    pub(super) fn window(&self) -> Option<u64> {
        self.window
    }

    fn quoted_name(&self) -> &[u8] {
        &self.member.as_bytes()[..self.name_bytes]
    }

    /// How often [`OURS`] stands before the name so that it is none of these.
    fn clashes(&self, taken: &[String]) -> usize {
        let is_taken = |clashes: &usize| {
            let ours = OURS.repeat(*clashes);
            taken
                .iter()
                .any(|name| name.strip_prefix(&*ours) == Some(&*self.name))
        };
        (0..=taken.len())
            .find(|clashes| !is_taken(clashes))
            .unwrap_or(0)
    }
}

/// One limit that a request met, after the decision.
#[derive(Clone, Copy, Debug)]
pub struct Met<'a> {
    /// The limit, for the client's tier.
    pub policy: &'a Policy,
    /// Whole units left.
    pub remaining: u64,
    /// Until one more unit is there; 0 when the bucket is full.
    pub next_unit_ns: u64,
    /// Until the bucket is full.
    pub reset_ns: u64,
    /// Whether this limit stopped the request.
    pub denied: bool,
    /// Whether it always will, because the request costs more than the bucket holds.
    pub never: bool,
    /// Whether an exception closes the limit to this client.
    pub closed: bool,
}

impl Met<'_> {
    /// `t`: the seconds for which the client should make do with what remains.
    ///
    /// `ceil(max(until one more unit, remaining · w / q))`. Dividing what remains by `t` then never gives more than the
    /// rate of the limit, and both readings of the parameter (draft-10 and draft-11) hold. Of what comes back all at once it
    /// is the time until then.
    pub(super) fn effective_window(&self) -> Option<u64> {
        let window = self.policy.window?;
        let next_unit = self.next_unit_ns.div_ceil(NS_PER_SECOND);
        if self.policy.refill == Refill::AtOnce && next_unit > 0 {
            return Some(next_unit.min(INTEGER_MAX));
        }
        let share = match self.remaining.checked_mul(window) {
            Some(product) => product.div_ceil(self.policy.quota),
            // a division of 128 bits, which is slow, is only for numbers that nobody has
            None => (u128::from(self.remaining) * u128::from(window))
                .div_ceil(u128::from(self.policy.quota))
                .min(u128::from(INTEGER_MAX)) as u64,
        };
        Some(share.max(next_unit).min(INTEGER_MAX))
    }
}

/// A request that was stopped.
#[derive(Clone, Copy, Debug)]
pub struct Denial<'a> {
    pub(super) met: &'a [Met<'a>],
    pub(super) retry_after_ns: Option<u64>,
    retry_after: Option<u32>,
}

impl<'a> Denial<'a> {
    /// `met` is every limit that it met, the binding one first; `retry_after_ns` when the same request would be admitted if
    /// nobody else spends, `None` when it never will be.
    pub fn new(met: &'a [Met<'a>], retry_after_ns: Option<u64>) -> Denial<'a> {
        let windows = met.iter().filter(|met| met.denied);
        let windows = windows.filter_map(Met::effective_window);
        let retry_after = retry_after_ns.map(|wait_ns| {
            let seconds = windows.fold(wait_ns.div_ceil(NS_PER_SECOND), u64::max);
            u32::try_from(seconds)
                .unwrap_or(RETRY_AFTER_MAX)
                .clamp(1, RETRY_AFTER_MAX)
        });
        Denial {
            met,
            retry_after_ns,
            retry_after,
        }
    }

    /// `Retry-After`: whole seconds, rounded up, at least 1, not earlier than `t` of any limit that stopped the request.
    pub fn retry_after(&self) -> Option<u32> {
        self.retry_after
    }

    /// The limit that the answer names: one that no wait helps against, or else the first that stopped the request.
    pub(super) fn named(&self) -> Option<&'a Met<'a>> {
        self.violated()
            .find(|met| met.never)
            .or_else(|| self.violated().next())
    }

    /// The limits that stopped it, in order.
    pub(super) fn violated(&self) -> impl Iterator<Item = &'a Met<'a>> + use<'a> {
        self.met.iter().filter(|met| met.denied)
    }
}

/// Writes field values, and the body of a rejection, into a buffer that it reuses. One for each worker.
#[derive(Debug)]
pub struct FieldWriter {
    buffer: BytesMut,
    /// `RateLimit-Policy` for limits that were written in this order before: the same for each of a route's requests that the
    /// same limit binds.
    written: Vec<(Places, HeaderValue)>,
    /// The heads of rejections by the same limits in the same order, with blanks.
    forms: Vec<(Rejection, HeaderMap)>,
}

/// Limits in the order in which they are shown, by the places of their policies in memory, which outlive the writer.
type Places = ArrayVec<usize, MAX_LIMITS>;

/// What the fields of a rejection depend on, but for the values of some.
#[derive(Debug, PartialEq, Eq)]
struct Rejection {
    settings: Settings,
    has_id: bool,
    may_return: bool,
    places: Places,
}

/// So many values of `RateLimit-Policy` are remembered, and so many heads.
const MAX_WRITTEN: usize = 8;

/// In place of a value that differs from one rejection to the next.
const BLANK: HeaderValue = HeaderValue::from_static("");
/// So many of those a rejection has: its id, `Retry-After`, and what changes in each family.
const MAX_BLANKS: usize = 7;

impl Default for FieldWriter {
    fn default() -> Self {
        FieldWriter::new()
    }
}

impl FieldWriter {
    /// A writer with its buffer.
    pub fn new() -> FieldWriter {
        FieldWriter {
            buffer: BytesMut::with_capacity(BUFFER_BYTES),
            written: Vec::new(),
            forms: Vec::new(),
        }
    }

    /// Adds what `settings` asks for to the head of an answer: ours, or the upstream's on its way back.
    ///
    /// `met` stands in the order in which it is shown, the binding limit first; where it is empty nothing is written.
    /// `now` is wall-clock time, for `X-RateLimit-Reset`.
    pub fn write(
        &mut self,
        headers: &mut HeaderMap,
        status: StatusCode,
        met: &[Met<'_>],
        settings: &Settings,
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
                headers.insert(limit, binding.policy.limit.clone());
                headers.insert(remaining, self.number(binding.remaining));
                headers.insert(at_reset, self.number(reset));
            }
        }
    }

    /// The head of a rejection. What differs from one rejection by these limits to the next is filled into a form, in the order
    /// of the form's blanks: copying a table costs a sixth of making one.
    pub(super) fn rejection(
        &mut self,
        denial: &Denial<'_>,
        asked: &Asked<'_>,
        settings: &Settings,
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
        values.extend(denial.retry_after.map(|wait| self.number(u64::from(wait))));
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
        head
    }

    /// The head of a rejection by these limits, with blanks.
    fn form(
        &mut self,
        denial: &Denial<'_>,
        asked: &Asked<'_>,
        settings: &Settings,
        met: &[Met<'_>],
    ) -> &HeaderMap {
        let (has_id, may_return) = (asked.request_id.is_some(), denial.retry_after.is_some());
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
                    head.insert(limit, binding.policy.limit.clone());
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

    /// The body of a rejection. Makes room for the fields too: memory can be taken again only while no slice is out.
    pub(super) fn body(
        &mut self,
        style: BodyStyle,
        denial: &Denial<'_>,
        asked: &Asked<'_>,
    ) -> Bytes {
        self.buffer.reserve(2 * ANSWER_BYTES);
        body::put_denial(&mut self.buffer, style, denial, asked);
        self.buffer.split().freeze()
    }

    /// A number as a value.
    fn number(&mut self, number: u64) -> HeaderValue {
        if number == 0 {
            // what remains to nearly everybody who is rejected
            return const { HeaderValue::from_static("0") };
        }
        put_number(&mut self.buffer, number.min(INTEGER_MAX));
        self.value()
    }

    /// The two fields that are lists, behind what the upstream says in them.
    fn list(&mut self, headers: &mut HeaderMap, met: &[Met<'_>]) {
        let fields = [
            (&RATELIMIT_POLICY, Listed::Policies),
            (&RATELIMIT, Listed::Standings),
        ];
        // nearly no upstream has any: a look at all names costs less than a search for each of the two
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

    fn policies(&mut self, met: &[Met<'_>], taken: &[String]) -> HeaderValue {
        if let ([only], []) = (met, taken) {
            return only.policy.member.clone();
        }
        if !taken.is_empty() {
            return self.policies_beside(met, taken);
        }
        let mut written = self.written.iter();
        let known = written.find(|(places, _)| are_at(met, places));
        if let Some((_, value)) = known {
            return value.clone();
        }
        // of memory of its own: a slice of the buffer would keep all of that
        let value = self.policies_beside(met, taken);
        let value = HeaderValue::from_bytes(value.as_bytes()).unwrap_or(value);
        if self.written.len() == MAX_WRITTEN {
            self.written.clear();
        }
        self.written.push((places(met), value.clone()));
        value
    }

    fn policies_beside(&mut self, met: &[Met<'_>], taken: &[String]) -> HeaderValue {
        for (at, met) in met.iter().enumerate() {
            self.separate(at);
            self.name(met.policy, taken);
            let parameters = &met.policy.member.as_bytes()[met.policy.name_bytes..];
            self.buffer.put_slice(parameters);
        }
        self.value()
    }

    fn standings(&mut self, met: &[Met<'_>], taken: &[String]) -> HeaderValue {
        for (at, met) in met.iter().enumerate() {
            self.separate(at);
            match taken {
                [] => self.buffer.put_slice(&met.policy.remains),
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

    /// The name of a limit in quotes, which none of the upstream's is.
    fn name(&mut self, policy: &Policy, taken: &[String]) {
        self.buffer.put_u8(b'"');
        for _ in 0..policy.clashes(taken) {
            self.buffer.put_slice(OURS.as_bytes());
        }
        self.buffer.put_slice(&policy.quoted_name()[1..]);
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

/// The families of three fields that are asked for, each with its reset: in seconds from now, and since 1970.
fn families_of_three(
    settings: &Settings,
    binding: &Met<'_>,
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

fn places(met: &[Met<'_>]) -> Places {
    let in_order = met.iter().take(MAX_LIMITS);
    in_order.map(|met| place(met.policy)).collect()
}

fn are_at(met: &[Met<'_>], places: &Places) -> bool {
    let in_order = met.iter().map(|met| place(met.policy));
    in_order.eq(places.iter().copied())
}

fn place(policy: &Policy) -> usize {
    std::ptr::from_ref(policy).addr()
}

/// Appends `number` in decimal.
pub(super) fn put_number(out: &mut BytesMut, number: u64) {
    out.put_slice(itoa::Buffer::new().format(number).as_bytes());
}

fn value_of(bytes: Bytes) -> HeaderValue {
    HeaderValue::from_maybe_shared(bytes)
        .expect("names are checked when compiled, the rest is ASCII of ours")
}

fn describe(name: &str, quota: &Quota) -> String {
    format!("{name} ({quota}, at most {} at once)", quota.burst)
}
