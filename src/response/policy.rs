//! The public description of a limit: its quota, its state after a request, and a denial with its
//! wait.
//!
//! Everything that does not depend on the request is prepared once in the form that is sent. The
//! rest is whole numbers: remaining units, and seconds rounded up so that no client retries too
//! early.

use bytes::{BufMut, Bytes, BytesMut};
use http::HeaderValue;

use super::{cost_terms::CostTerms, json_text};
use crate::{
    cost::Decimal,
    limit::{Quota, Refill},
};

/// The largest integer of a structured field (RFC 9651 §3.3.1).
pub(super) const INTEGER_MAX: u64 = 999_999_999_999_999;
/// The most seconds that every client can represent (2³¹ − 1).
const RETRY_AFTER_MAX: u32 = 2_147_483_647;
pub(super) const NS_PER_SECOND: u64 = 1_000_000_000;

/// The limit's name is not printable ASCII, so it cannot be sent to clients (RFC 9651 §3.3.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the name of a limit is sent to clients: it must be printable ASCII, and not empty")]
pub struct BadPolicyName;

/// The request-independent description of a limit, prepared once per limit and tier.
#[derive(Clone, Debug)]
pub struct Policy {
    name: Box<str>,
    /// `per_ip (100/s, at most 200 at once)`.
    described: Box<str>,
    /// `name` and `described`, escaped for JSON strings.
    in_json: [Box<[u8]>; 2],
    /// The burst: the most units at once.
    quota: u64,
    /// Seconds until an exhausted quota is full again, rounded up. `None` for slots, which time
    /// does not refill.
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
    /// Set if the limit counts costs.
    cost: Option<Box<CostTerms>>,
}

impl Policy {
    /// Describes the limit `name` with `quota`.
    pub fn compile(name: &str, quota: &Quota) -> Result<Policy, BadPolicyName> {
        let burst = quota.burst.get();
        let full_after_ns = u128::from(burst).saturating_mul(quota.period.as_nanos());
        let per_second = u128::from(quota.amount.get()) * u128::from(NS_PER_SECOND);
        let window = full_after_ns
            .div_ceil(per_second)
            .clamp(1, u128::from(INTEGER_MAX)) as u64;
        Policy::new(name, describe(name, quota), burst, Some(window))
    }

    /// Like [`Policy::compile`], for a limit that refills all at once: a fixed window or a log.
    pub fn of_window(name: &str, quota: &Quota) -> Result<Policy, BadPolicyName> {
        let refill = Refill::AtOnce;
        Ok(Policy {
            refill,
            ..Policy::compile(name, quota)?
        })
    }

    /// Describes the limit `name` that allows `slots` requests in flight.
    pub fn of_slots(name: &str, slots: u64) -> Result<Policy, BadPolicyName> {
        Ok(Policy {
            refill: Refill::OnRelease,
            ..Policy::new(name, format!("{name} ({slots} at a time)"), slots, None)?
        })
    }

    /// The same for a limit that counts costs: its members name the unit.
    pub fn with_costs(self, quota: &Quota, terms: CostTerms) -> Policy {
        let described = describe_costs(&self.name, quota, &terms);
        let mut member = BytesMut::from(self.member.as_bytes());
        member.put_slice(b";qu=\"");
        let is_plain = |byte: &u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\');
        member.extend(terms.unit.bytes().filter(is_plain));
        member.put_u8(b'"');
        Policy {
            in_json: [&self.name, &*described].map(json_text::escaped),
            described: described.into(),
            member: value_of(member.freeze()),
            cost: Some(Box::new(terms)),
            ..self
        }
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
            in_json: [name, &described].map(json_text::escaped),
            name: name.into(),
            described: described.into(),
            quota,
            window,
            refill: Refill::Gradual,
            limit: HeaderValue::from(quota.min(INTEGER_MAX)),
            member: value_of(text.freeze()),
            name_bytes,
            remains,
            cost: None,
        })
    }

    /// What a limit on costs tells clients beside its quota.
    pub(super) fn cost_terms(&self) -> Option<&CostTerms> {
        self.cost.as_deref()
    }

    /// The limit's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The limit with its quota, for a sentence.
    pub(super) fn described(&self) -> &str {
        &self.described
    }

    /// The name, escaped for a JSON string.
    pub(super) fn name_in_json(&self) -> &[u8] {
        &self.in_json[0]
    }

    /// The limit with its quota, escaped for a JSON string.
    pub(super) fn described_in_json(&self) -> &[u8] {
        &self.in_json[1]
    }

    /// The burst: the most units at once.
    pub(super) fn quota(&self) -> u64 {
        self.quota
    }

    /// Seconds until an exhausted quota is full again; `None` for slots.
    pub(super) fn window(&self) -> Option<u64> {
        self.window
    }

    /// `200`.
    pub(super) fn limit(&self) -> &HeaderValue {
        &self.limit
    }

    /// Its member of `RateLimit-Policy`: `"per_ip";q=200;w=2`.
    pub(super) fn member(&self) -> &HeaderValue {
        &self.member
    }

    /// `"per_ip"` and `;q=200;w=2`.
    pub(super) fn name_and_parameters(&self) -> (&[u8], &[u8]) {
        self.member.as_bytes().split_at(self.name_bytes)
    }

    /// The start of its member of `RateLimit`: `"per_ip";r=`.
    pub(super) fn remains(&self) -> &[u8] {
        &self.remains
    }
}

/// The state of one limit that applied to a request, after the decision.
#[derive(Clone, Copy, Debug)]
pub struct LimitReport<'a> {
    /// The limit, for the client's tier.
    pub policy: &'a Policy,
    /// Whole units left.
    pub remaining: u64,
    /// Time until one more unit is available; 0 if the bucket is full. If this limit rejected the
    /// request: time until the request fits.
    pub available_ns: u64,
    /// Time until the bucket is full.
    pub reset_ns: u64,
    /// Whether this limit rejected the request.
    pub denied: bool,
    /// Whether it will always reject the request, because the request costs more than the bucket
    /// holds.
    pub never: bool,
    /// Whether an exception blocks this client.
    pub closed: bool,
}

impl LimitReport<'_> {
    /// `t`: the seconds for which the remaining units should last.
    ///
    /// `ceil(max(time until one more unit, remaining · w / q))`. So `remaining / t` never exceeds
    /// the limit's rate, and both readings of the parameter (draft-10 and draft-11) hold. If the
    /// quota refills all at once, `t` is the time until then. If this limit rejected the request,
    /// `t` is the time until the request fits: `Retry-After` must not be earlier than `t`, and
    /// should not be later than the request needs.
    pub(super) fn effective_window(&self) -> Option<u64> {
        let window = self.policy.window?;
        let available = self.available_ns.div_ceil(NS_PER_SECOND);
        let is_told = self.policy.refill == Refill::AtOnce || self.denied && !self.never;
        if is_told && available > 0 {
            return Some(available.min(INTEGER_MAX));
        }
        let share = match self.remaining.checked_mul(window) {
            Some(product) => product.div_ceil(self.policy.quota),
            // overflows only for unrealistic numbers; 128-bit division is slow
            None => (u128::from(self.remaining) * u128::from(window))
                .div_ceil(u128::from(self.policy.quota))
                .min(u128::from(INTEGER_MAX)) as u64,
        };
        Some(share.max(available).min(INTEGER_MAX))
    }
}

/// A request that limits rejected.
#[derive(Clone, Copy, Debug)]
pub struct RejectedRequest<'a> {
    pub(super) met: &'a [LimitReport<'a>],
    pub(super) retry_after_ns: Option<u64>,
    retry_after: Option<u32>,
}

impl<'a> RejectedRequest<'a> {
    /// `met` lists all limits that apply, the binding one first. `retry_after_ns` is the time until
    /// the same request is admitted if nothing else is spent; `None` if it never is.
    pub fn new(met: &'a [LimitReport<'a>], retry_after_ns: Option<u64>) -> RejectedRequest<'a> {
        let windows = met.iter().filter(|met| met.denied);
        let windows = windows.filter_map(LimitReport::effective_window);
        let retry_after = retry_after_ns.map(|wait_ns| {
            let seconds = windows.fold(wait_ns.div_ceil(NS_PER_SECOND), u64::max);
            u32::try_from(seconds)
                .unwrap_or(RETRY_AFTER_MAX)
                .clamp(1, RETRY_AFTER_MAX)
        });
        RejectedRequest {
            met,
            retry_after_ns,
            retry_after,
        }
    }

    /// `Retry-After`: whole seconds, rounded up, at least 1, and at least `t` of each limit that
    /// rejected the request.
    pub fn retry_after(&self) -> Option<u32> {
        self.retry_after
    }

    /// The limit named in the response: one that will always reject the request, otherwise the
    /// first that rejected it.
    pub(super) fn named(&self) -> Option<&'a LimitReport<'a>> {
        self.violated()
            .find(|met| met.never)
            .or_else(|| self.violated().next())
    }

    /// The limits that rejected the request, in order.
    pub(super) fn violated(&self) -> impl Iterator<Item = &'a LimitReport<'a>> + use<'a> {
        self.met.iter().filter(|met| met.denied)
    }
}

/// Appends `number` in decimal.
pub(super) fn put_number(out: &mut BytesMut, number: u64) {
    out.put_slice(itoa::Buffer::new().format(number).as_bytes());
}

/// A header value without copying.
pub(super) fn value_of(bytes: Bytes) -> HeaderValue {
    HeaderValue::from_maybe_shared(bytes)
        .expect("names are checked by `compile`, the rest is fixed ASCII")
}

/// `tokens (20000/min, at most 20000 tokens at once)`, or with money `day (2.5 usd/d, at most 2.5
/// usd at once)`.
fn describe_costs(name: &str, quota: &Quota, terms: &CostTerms) -> String {
    let CostTerms { unit, currency, .. } = terms;
    let rate = quota.to_string();
    let Some((currency, (_, period))) = currency.as_ref().zip(rate.split_once('/')) else {
        return format!("{name} ({rate}, at most {} {unit} at once)", quota.burst);
    };
    // A millionth is 1,000 units of 10⁻⁹.
    let money = |units: u64| match units.checked_mul(1_000) {
        Some(nanos) => Decimal::from_nanos(nanos).to_string(),
        None => (units / 1_000_000).to_string(),
    };
    let (amount, burst) = (money(quota.amount.get()), money(quota.burst.get()));
    format!("{name} ({amount} {currency}/{period}, at most {burst} {currency} at once)")
}

fn describe(name: &str, quota: &Quota) -> String {
    format!("{name} ({quota}, at most {} at once)", quota.burst)
}
