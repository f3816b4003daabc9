//! A running limit on costs: its settings, what its answers have taught it, and what it claims of
//! a request on arrival.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName};

use crate::{
    config::{CostSettings, CostSource, ModelSource},
    cost::{
        CostBasis, CostEstimate, CostInputs, CostUnits, LearnedRatios, MAX_MODEL_BYTES,
        ModelRatios, UnreadBody, decimal::scaled_up, number_at,
    },
    identity::KeySubject,
    telemetry::{Metrics, cost::CostMetrics},
};

/// Every source of a settled cost, as metrics name it.
const SOURCES: [CostBasis; 7] = [
    CostBasis::Reported,
    CostBasis::Counted,
    CostBasis::Reserved,
    CostBasis::Fixed,
    CostBasis::Refunded,
    CostBasis::Silent,
    CostBasis::Aborted,
];
/// Why an answer's usage is not known, as metrics name it.
const UNREAD: [&str; 5] = ["encoding", "not_json", "too_deep", "implausible", "type"];
/// A compressed answer is logged at most this often for each limit.
const WARNING_PAUSE_NS: u64 = 60_000_000_000;

/// How a running limit charges costs.
#[derive(Debug)]
pub(super) struct CostPlan {
    pub(super) settings: Arc<CostSettings>,
    /// Kept when a reload keeps the limit's name.
    pub(super) learned: Arc<LearnedRatios>,
    pub(super) metrics: CostMetrics,
    warned_ns: AtomicU64,
}

impl CostPlan {
    pub(super) fn bind(
        limit: &str,
        settings: &Arc<CostSettings>,
        metrics: &Metrics,
        before: Option<&CostPlan>,
    ) -> CostPlan {
        let table = match &settings.rule.units {
            CostUnits::Money(table) => Some(table),
            _ => None,
        };
        let models = || table.iter().flat_map(|table| table.names());
        let new = || Arc::new(LearnedRatios::new(models(), settings.rule.max));
        let sources = SOURCES.map(CostBasis::as_str);
        CostPlan {
            learned: before.map_or_else(new, |before| Arc::clone(&before.learned)),
            metrics: metrics.cost(limit, &sources, &UNREAD, models()),
            settings: Arc::clone(settings),
            warned_ns: AtomicU64::new(0),
        }
    }

    /// Whether an estimate is reserved on arrival, and settled when the cost is known.
    pub(super) fn reserves(&self) -> bool {
        !self.settings.source.is_known_on_arrival()
    }

    /// The units to claim of a request, before the bound of the limit.
    pub(super) fn claim(
        &self,
        known: &KnownCost<'_>,
        is_trusted: bool,
        headers: &HeaderMap,
        subject: &KeySubject<'_>,
    ) -> u64 {
        let scale = self.settings.scale;
        let stated = match &self.settings.source {
            CostSource::Fixed => Some(known.route),
            CostSource::RequestHeader(name) if is_trusted => {
                sole(headers, name).and_then(|text| scaled_up(text, scale))
            }
            CostSource::RequestJson(path) => known
                .facts
                .and_then(|facts| number_at(facts.body.as_ref()?, path, scale)),
            _ => None,
        };
        match stated {
            Some(units) => units.min(self.settings.rule.max),
            None => self.estimate(known, headers, subject).units,
        }
    }

    /// The estimate for a request.
    pub(super) fn estimate(
        &self,
        known: &KnownCost<'_>,
        headers: &HeaderMap,
        subject: &KeySubject<'_>,
    ) -> CostEstimate {
        let length = CostInputs::of_length(announced_bytes(headers));
        let inputs = known.facts.map_or(&length, |facts| &facts.inputs);
        let rule = &self.settings.rule;
        match self.settings.model {
            ModelSource::Body => rule.estimate(inputs, &self.learned),
            _ => {
                let model = self.model(Some(inputs), headers, subject);
                let inputs = CostInputs {
                    model: model.map(str::to_owned),
                    ..inputs.clone()
                };
                rule.estimate(&inputs, &self.learned)
            }
        }
    }

    /// The model that a request names.
    pub(super) fn model<'s>(
        &self,
        inputs: Option<&'s CostInputs>,
        headers: &'s HeaderMap,
        subject: &'s KeySubject<'_>,
    ) -> Option<&'s str> {
        let name = match &self.settings.model {
            ModelSource::Body => inputs?.model.as_deref()?,
            ModelSource::Param(name) => {
                let value = (subject.params)(name)?;
                value.split(':').next().unwrap_or(value)
            }
            ModelSource::Header(name) => std::str::from_utf8(sole(headers, name)?).ok()?,
        };
        (!name.is_empty() && name.len() <= MAX_MODEL_BYTES).then_some(name)
    }

    /// What was learned of a model.
    pub(super) fn ratios(&self, model: Option<&str>) -> ModelRatios {
        let rule = &self.settings.rule;
        self.learned
            .ratios(Some(rule.learned_as(model)), &rule.first)
    }

    /// Counts an answer whose usage is not read. A compressed one is logged once a minute.
    pub(super) fn count_unread(&self, now_ns: u64, limit: &str, upstream: &str, why: UnreadBody) {
        self.metrics.unread(match why {
            UnreadBody::Encoding => "encoding",
            UnreadBody::ContentType => "type",
            UnreadBody::NotJson => "not_json",
            UnreadBody::TooDeep => "too_deep",
        });
        let warned_ns = self.warned_ns.load(Relaxed);
        let is_due = warned_ns == 0 || now_ns.saturating_sub(warned_ns) >= WARNING_PAUSE_NS;
        if why == UnreadBody::Encoding && is_due {
            self.warned_ns.store(now_ns.max(1), Relaxed);
            tracing::warn!(
                limit,
                upstream,
                "the upstream compresses answers although it was asked for `identity`: their usage \
                 cannot be read, and the limit charges what it counts"
            );
        }
    }
}

/// The value of a field that occurs once.
pub(super) fn sole<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h [u8]> {
    let mut lines = headers.get_all(name).iter();
    let value = lines.next()?;
    lines
        .next()
        .is_none()
        .then(|| value.as_bytes().trim_ascii())
}

/// The length that a request announces; 0 if it does not.
pub(super) fn announced_bytes(headers: &HeaderMap) -> u64 {
    let length = headers.get(http::header::CONTENT_LENGTH);
    let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
    length.unwrap_or(0)
}

/// What a request's body says about its cost.
#[derive(Clone, Debug)]
pub(super) struct CostFacts {
    pub(super) inputs: CostInputs,
    /// Only for costs that stand in the body itself.
    pub(super) body: Option<Bytes>,
}

/// What is known about the cost of a request on arrival.
#[derive(Clone, Copy, Debug)]
pub(super) struct KnownCost<'r> {
    /// The `cost` of the route.
    pub(super) route: u64,
    /// `None` if the body is not read.
    pub(super) facts: Option<&'r CostFacts>,
}

impl KnownCost<'_> {
    /// A request that costs one unit.
    pub(super) const ONE: KnownCost<'static> = KnownCost {
        route: 1,
        facts: None,
    };
}

/// What the limits on costs of a route need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CostNeeds {
    /// The body of the request.
    pub(super) reads_request: bool,
    /// The body of the request after the estimate.
    pub(super) keeps_request: bool,
    /// The body of the answer, not compressed.
    pub(super) reads_answer: bool,
    /// A report of the usage of streams.
    pub(super) asks_usage: bool,
    /// The bytes of the request.
    pub(super) counts_request: bool,
}

impl CostNeeds {
    pub(super) fn of<'a>(costs: impl Iterator<Item = &'a CostSettings>) -> CostNeeds {
        let mut needs = CostNeeds::default();
        for cost in costs {
            let source = &cost.source;
            needs.keeps_request |= matches!(source, CostSource::RequestJson(_));
            needs.reads_request |= cost.reads_request || needs.keeps_request;
            needs.reads_answer |= source.reads_answer();
            needs.asks_usage |= cost.ask_usage;
            needs.counts_request |= matches!(source, CostSource::RequestBytes | CostSource::Bytes);
        }
        needs
    }
}
