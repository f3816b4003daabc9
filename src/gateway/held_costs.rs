//! The units that a request holds in limits on costs, from its admission until they are settled.
//!
//! ```text
//! admitted ─▶ held ─▶ sending ─▶ head of the answer ─▶ pieces: the reservation may grow ─▶ settled
//! ```
//!
//! The guard belongs to the request, then to its record, and drops with the body of the answer. So
//! every way out settles it once: a whole answer, a client that leaves, an error, a drain, a panic.

use std::{cell::Cell, rc::Rc, sync::Arc};

use http::{HeaderMap, Method, StatusCode};
use smallvec::SmallVec;
use tokio::time::Instant;

use super::{active_config::ActiveConfig, cost_rule::sole, plan::LimitRule};
use crate::{
    budget::{DecisionSource, LateCharge, SharedClaim, SharedKeyName},
    config::CostSource,
    cost::{
        ActualCost, AnswerEnding, AnswerFacts, CostReservation, ModelRatios, Refund, ReportedUsage,
        UsageMeter, decimal::scaled_up,
    },
    limit::{Charge, ChargeLocation, Key},
    telemetry::access::CostPart,
};

/// All reservations of one request.
#[derive(Debug)]
pub(super) struct HeldCosts {
    active: Arc<ActiveConfig>,
    pub(super) held: SmallVec<[HeldCost; 1]>,
    request: CostedRequest,
    stage: ExchangeStage,
    /// When the request was sent.
    sent: Option<Instant>,
    /// Bytes of the answer's body.
    pub(super) answer_bytes: u64,
    /// One for each format that a limit reads.
    pub(super) meters: Vec<UsageMeter>,
    /// When a key of a limit with `cut` was first found with nothing left.
    pub(super) spent: Option<Instant>,
    settled: Option<SettledCost>,
}

/// What the request says about its cost.
#[derive(Clone, Debug, Default)]
pub(super) struct CostedRequest {
    /// Bytes that the estimate counts.
    pub(super) bytes: u64,
    pub(super) model: Option<Box<str>>,
    pub(super) choices: u64,
    /// Bytes of its body as they arrive, for limits on bytes.
    pub(super) counted: Option<Rc<Cell<u64>>>,
    pub(super) upstream: Option<Arc<str>>,
}

/// The reservation in one limit.
#[derive(Debug)]
pub(super) struct HeldCost {
    pub(super) rule: Arc<LimitRule>,
    pub(super) tier: usize,
    pub(super) key: Option<Key>,
    /// Where a local limit was charged.
    pub(super) place: ChargeLocation,
    /// Set for a limit that gateways share.
    pub(super) shared: Option<(SharedKeyName, DecisionSource)>,
    pub(super) reservation: CostReservation,
    pub(super) ratios: ModelRatios,
    /// The units reserved on arrival.
    pub(super) estimate: u64,
    /// The cost in a header or a trailer.
    pub(super) stated: Option<u64>,
    /// Index of its meter.
    pub(super) meter: Option<usize>,
}

/// How far the exchange is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExchangeStage {
    NotSent,
    Sent,
    Answered { status: StatusCode, has_body: bool },
    Whole { status: StatusCode, has_body: bool },
}

/// What the access line says of the settled cost.
#[derive(Clone, Debug)]
pub(super) struct SettledCost {
    cost: u64,
    held: u64,
    source: &'static str,
    unit: Arc<str>,
    model: Option<Box<str>>,
    tokens: Option<[u64; 3]>,
}

impl SettledCost {
    pub(super) fn part(&self) -> CostPart<'_> {
        CostPart {
            cost: self.cost,
            held: self.held,
            source: self.source,
            unit: &self.unit,
            model: self.model.as_deref(),
            tokens: self.tokens,
        }
    }
}

impl HeldCosts {
    /// Holds nothing yet. The first reservation is the one that access lines tell.
    pub(super) fn new(active: &Arc<ActiveConfig>, request: CostedRequest) -> HeldCosts {
        HeldCosts {
            active: Arc::clone(active),
            held: SmallVec::new(),
            request,
            stage: ExchangeStage::NotSent,
            sent: None,
            answer_bytes: 0,
            meters: Vec::new(),
            spent: None,
            settled: None,
        }
    }

    pub(super) fn push(&mut self, held: HeldCost) {
        if let Some(cost) = &held.rule.cost {
            cost.metrics.reserved.increment(held.estimate);
            cost.metrics.in_flight.increment(held.estimate as f64);
        }
        self.held.push(held);
    }

    /// Whether a limit counts the bytes of the request.
    pub(super) fn counts_request(&self) -> bool {
        self.held.iter().any(|held| {
            let source = held.rule.cost.as_ref().map(|cost| &cost.settings.source);
            matches!(source, Some(CostSource::RequestBytes | CostSource::Bytes))
        })
    }

    /// Counts the bytes of the request's body here.
    pub(super) fn count_request(&mut self) -> Rc<Cell<u64>> {
        Rc::clone(self.request.counted.get_or_insert_default())
    }

    /// The request is about to be sent.
    pub(super) fn sending(&mut self, now: Instant, upstream: &str) {
        self.stage = ExchangeStage::Sent;
        self.sent = Some(now);
        self.request.upstream = Some(upstream.into());
    }

    /// No server has received the whole request.
    pub(super) fn was_not_sent(&mut self) {
        self.stage = ExchangeStage::NotSent;
    }

    /// The head of a server's answer. Removes the fields that a limit hides.
    pub(super) fn answered(&mut self, method: &Method, status: StatusCode, fields: &mut HeaderMap) {
        let is_bodiless = method == Method::HEAD
            || status.is_informational() && status != StatusCode::SWITCHING_PROTOCOLS
            || [StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&status);
        let has_body = !is_bodiless;
        self.stage = ExchangeStage::Answered { status, has_body };
        for held in &mut self.held {
            let Some(settings) = held.rule.cost.as_ref().map(|cost| &cost.settings) else {
                continue;
            };
            match &settings.source {
                CostSource::ResponseHeader(name) => {
                    let stated = sole(fields, name);
                    held.stated = stated.and_then(|text| scaled_up(text, settings.scale));
                }
                CostSource::ResponseJson(schema)
                    if has_body && status != StatusCode::SWITCHING_PROTOCOLS =>
                {
                    let is_same = |meter: &UsageMeter| meter.reads_like(schema);
                    let known = self.meters.iter().position(is_same);
                    held.meter = Some(known.unwrap_or(self.meters.len()));
                    if known.is_none() {
                        let meter = UsageMeter::new(Arc::clone(schema), status, fields);
                        self.meters.push(meter);
                    }
                }
                _ => {}
            }
        }
        for held in &self.held {
            let settings = held.rule.cost.as_ref().map(|cost| &cost.settings);
            if let Some(settings) = settings.filter(|settings| settings.hide)
                && let CostSource::ResponseHeader(name) = &settings.source
            {
                fields.remove(name);
            }
        }
    }

    /// Bytes of an answer that is not read.
    pub(super) fn passed(&mut self, bytes: u64) {
        self.answer_bytes = self.answer_bytes.saturating_add(bytes);
    }

    /// The trailers of the answer. Removes those that a limit hides.
    pub(super) fn trailers(&mut self, trailers: &mut HeaderMap) {
        for held in &mut self.held {
            let settings = held.rule.cost.as_ref().map(|cost| &cost.settings);
            if let Some(settings) = settings
                && let CostSource::ResponseTrailer(name) = &settings.source
            {
                let stated = sole(trailers, name);
                held.stated = stated.and_then(|text| scaled_up(text, settings.scale));
            }
        }
        for held in &self.held {
            let settings = held.rule.cost.as_ref().map(|cost| &cost.settings);
            if let Some(settings) = settings.filter(|settings| settings.hide)
                && let CostSource::ResponseTrailer(name) = &settings.source
            {
                trailers.remove(name);
            }
        }
    }

    /// The answer has ended as the server meant it to.
    pub(super) fn ended(&mut self) {
        if let ExchangeStage::Answered { status, has_body } = self.stage {
            self.stage = ExchangeStage::Whole { status, has_body };
            self.meters.iter_mut().for_each(UsageMeter::end);
        }
    }

    /// Leaves everything charged as estimated: another proxy serves the request, and this gateway
    /// never learns what it cost.
    pub(super) fn leave_charged(mut self) {
        for held in self.held.drain(..) {
            let units = held.reservation.held();
            if let Some(cost) = &held.rule.cost {
                cost.metrics.in_flight.decrement(units as f64);
                cost.metrics.settled.increment(units);
                cost.metrics.settled_from("reserved");
            }
        }
    }

    /// Settles every reservation, once. Returns what the access line tells.
    pub(super) fn settle(&mut self) -> Option<&SettledCost> {
        let ending = self.ending();
        let held = std::mem::take(&mut self.held);
        let now_ns = match held.is_empty() {
            true => 0,
            false => self.now_ns(),
        };
        for held in held {
            let settled = self.settle_one(&held, ending, now_ns);
            self.settled.get_or_insert(settled);
        }
        self.settled.as_ref()
    }

    fn ending(&self) -> AnswerEnding {
        match self.stage {
            ExchangeStage::NotSent => AnswerEnding::NotSent,
            ExchangeStage::Sent => AnswerEnding::Silent,
            ExchangeStage::Whole { status, has_body } => AnswerEnding::Whole { status, has_body },
            ExchangeStage::Answered { status, .. } => AnswerEnding::Aborted { status },
        }
    }

    fn status(&self) -> Option<StatusCode> {
        match self.stage {
            ExchangeStage::Whole { status, .. } | ExchangeStage::Answered { status, .. } => {
                Some(status)
            }
            ExchangeStage::NotSent | ExchangeStage::Sent => None,
        }
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.active.process.nanoseconds(Instant::now())
    }

    pub(super) fn facts(&self, held: &HeldCost) -> AnswerFacts<'_> {
        let meter = held.meter.and_then(|meter| self.meters.get(meter));
        AnswerFacts {
            request_bytes: self.request.bytes,
            request_model: self.request.model.as_deref(),
            answer_model: meter.and_then(UsageMeter::model),
            choices: self.request.choices,
            reported: self.reported(held, meter),
            progress: meter.map_or(0, UsageMeter::progress),
            answer_bytes: self.answer_bytes,
        }
    }

    fn reported(&self, held: &HeldCost, meter: Option<&UsageMeter>) -> Option<ReportedUsage> {
        let sent = self.request.counted.as_ref().map_or(0, |count| count.get());
        let units = match &held.rule.cost.as_ref()?.settings.source {
            CostSource::ResponseJson(_) => return meter?.reported(),
            CostSource::ResponseHeader(_) | CostSource::ResponseTrailer(_) => held.stated?,
            CostSource::RequestBytes => sent,
            CostSource::ResponseBytes => self.answer_bytes,
            CostSource::Bytes => sent.saturating_add(self.answer_bytes),
            CostSource::UpstreamTime => {
                u64::try_from(self.sent?.elapsed().as_millis()).unwrap_or(u64::MAX)
            }
            CostSource::Fixed | CostSource::RequestHeader(_) | CostSource::RequestJson(_) => {
                return None;
            }
        };
        Some(ReportedUsage::Units(units))
    }

    /// Charges units beyond the reservation. Returns those that are forgiven.
    pub(super) fn charge(&self, held: &HeldCost, units: u64, now_ns: u64) -> u64 {
        match self.shared(held, units) {
            Some((claim, name)) => self.active.budget.as_ref().map_or(0, |budget| {
                budget.settle(now_ns, &claim, name, LateCharge::Extra)
            }),
            None => self
                .active
                .process
                .store
                .overdraw(now_ns, &held.claim(units)),
        }
    }

    fn refund(&self, held: &HeldCost, refund: Refund) {
        if refund.units == 0 {
            return;
        }
        let charged_ns = refund.charged_ns;
        match self.shared(held, refund.units) {
            Some((claim, name)) => {
                let source = held.shared.map(|(_, source)| source).unwrap_or_default();
                let refund = LateCharge::Refund { source, charged_ns };
                if let Some(budget) = &self.active.budget {
                    // if the lease manager's queue is full, the units count as spent
                    budget.settle(self.now_ns(), &claim, name, refund);
                }
            }
            None => {
                let charge = held.claim(refund.units);
                self.active
                    .process
                    .store
                    .release(charged_ns, &charge, held.place);
            }
        }
    }

    fn shared<'h>(
        &self,
        held: &'h HeldCost,
        units: u64,
    ) -> Option<(SharedClaim<'h>, SharedKeyName)> {
        let (name, _) = held.shared?;
        let claim = SharedClaim {
            limit: held.rule.shared.as_ref()?,
            tier: held.tier,
            key: held.key,
            cost: units,
        };
        Some((claim, name))
    }

    fn settle_one(&self, held: &HeldCost, ending: AnswerEnding, now_ns: u64) -> SettledCost {
        let facts = self.facts(held);
        let before = held.reservation.held();
        let Some(cost) = &held.rule.cost else {
            return SettledCost::nothing();
        };
        let (rule, metrics) = (&cost.settings.rule, &cost.metrics);
        let mut actual = rule.actual(ending, &held.ratios, &facts, before);
        let counted = &held.rule.settings.count_status;
        let is_counted = |status| counted.contains(&status);
        if !counted.is_empty() && !self.status().is_some_and(is_counted) {
            actual = ActualCost::REFUNDED;
        }
        if actual.is_implausible {
            metrics.unread("implausible");
        }
        self.note_unread(held, &facts, now_ns);
        let settlement = held.reservation.settle(actual.units);
        let mut forgiven = settlement.forgiven;
        if settlement.extra > 0 {
            let left = self.left(held, now_ns);
            forgiven += self.charge(held, settlement.extra, now_ns);
            if left.is_some_and(|left| (1..settlement.extra).contains(&left)) {
                metrics.owed_keys.increment(1);
            }
        }
        for refund in settlement.refunds {
            self.refund(held, refund);
        }
        metrics.extra.increment(settlement.extra);
        metrics.refunded.increment(settlement.refunded);
        metrics.forgiven.increment(forgiven);
        metrics.settled.increment(actual.units);
        metrics.settled_from(actual.basis.as_str());
        metrics.in_flight.decrement(before as f64);
        if actual.units > 0 && held.estimate > 0 {
            metrics
                .ratio
                .record(actual.units as f64 / held.estimate as f64);
        }
        let model = facts.priced_model(rule);
        metrics.of_model(rule.learned_as(model), actual.units);
        rule.learn(ending, &facts, &cost.learned);
        SettledCost {
            cost: actual.units,
            held: before,
            source: actual.basis.as_str(),
            unit: Arc::clone(&cost.settings.unit),
            model: model.map(Box::from),
            tokens: match facts.reported {
                Some(ReportedUsage::Tokens(usage)) => {
                    Some([usage.input, usage.cached, usage.output])
                }
                _ => None,
            },
        }
    }

    /// Counts a body whose usage could not be read.
    fn note_unread(&self, held: &HeldCost, facts: &AnswerFacts<'_>, now_ns: u64) {
        let is_error = self.status().is_none_or(|status| status.as_u16() >= 400);
        let meter = held.meter.and_then(|meter| self.meters.get(meter));
        let unread = meter.and_then(UsageMeter::unread);
        if let (Some(why), Some(cost)) = (unread, &held.rule.cost)
            && facts.reported.is_none()
            && !is_error
        {
            let upstream = self.request.upstream.as_deref().unwrap_or_default();
            cost.count_unread(now_ns, &held.rule.name, upstream, why);
        }
    }

    /// Units left of a key; `None` if a shared limit does not say.
    pub(super) fn left(&self, held: &HeldCost, now_ns: u64) -> Option<u64> {
        let charge = held.claim(1);
        let finding = match self.shared(held, 1) {
            Some((claim, _)) => {
                let budget = self.active.budget.as_ref()?;
                budget.look(now_ns, &[claim]).ok()?.findings.pop()?
            }
            None => {
                let verdict = self.active.process.store.peek(now_ns, &[charge]);
                return Some(verdict.findings.first()?.standing().remaining);
            }
        };
        Some(finding.standing().remaining)
    }
}

impl HeldCost {
    fn claim(&self, units: u64) -> Charge<'_> {
        Charge {
            limit: &self.rule.buckets,
            tier: self.tier,
            key: self.key,
            cost: units,
            max_delay_ns: self.rule.max_delay_ns,
        }
    }
}

impl SettledCost {
    fn nothing() -> SettledCost {
        SettledCost {
            cost: 0,
            held: 0,
            source: "fixed",
            unit: Arc::from("units"),
            model: None,
            tokens: None,
        }
    }
}

impl Drop for HeldCosts {
    fn drop(&mut self) {
        self.settle();
    }
}
