//! How one limit charges requests: the estimate, the usage so far, and the final cost.
//!
//! Everything that differs between limits is here: weights or prices, the estimate, and the rules
//! for answers that end early or report nothing. The gateway supplies how the exchange ended
//! ([`AnswerEnding`]) and what is known about it ([`AnswerFacts`]).

use std::sync::Arc;

use http::StatusCode;

use super::{
    decimal::{Decimal, MAX_VALUE},
    format::{ReportedUsage, TokenUsage},
    learned::{AnswerSample, FirstRatios, LearnedRatios, ModelRatios},
    price::{PriceTable, TokenPrices},
    request::CostInputs,
};

/// The unit of a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CostUnits {
    /// Tokens, with a weight per part.
    Tokens(TokenPrices),
    /// Millionths of money, at the model's prices.
    Money(Arc<PriceTable>),
    /// A number that the answer reports or the gateway counts, such as points, bytes or
    /// milliseconds. It is the whole cost.
    Whole,
    /// Seconds of a transcription.
    Seconds,
}

/// How to estimate a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EstimateKind {
    /// Input from its bytes, plus the mean output.
    Learned,
    /// Input from its bytes, plus the most output that the request allows.
    MaxTokens,
    /// Input from its bytes.
    Input,
    /// This many units.
    Fixed(u64),
}

/// The cost of a failed exchange without reported usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureCost {
    /// Nothing.
    Refund,
    /// The input.
    Input,
    /// The held units.
    Reserved,
}

/// The cost of a complete answer without reported usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnreportedCost {
    /// The input, plus the output as counted.
    Counted,
    /// The held units.
    Reserved,
    /// This many units.
    Fixed(u64),
}

/// How one limit charges costs.
#[derive(Clone, Debug, PartialEq)]
pub struct CostRule {
    /// The unit.
    pub units: CostUnits,
    /// The estimate to reserve.
    pub estimate: EstimateKind,
    /// Assumptions before anything is learned.
    pub first: FirstRatios,
    /// When a stream outgrows its reservation, reserve this share more than it has used.
    pub grow: Decimal,
    /// If a client leaves, charge at least the held units.
    pub reserved_on_abort: bool,
    /// The cost of an answer of 400 or above without reported usage.
    pub on_error: FailureCost,
    /// The cost if the request was sent but no answer came.
    pub on_silence: FailureCost,
    /// The cost of a complete answer below 400 without reported usage.
    pub unreported: UnreportedCost,
    /// The largest plausible cost.
    pub max: u64,
}

/// An estimate with its terms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostEstimate {
    /// Units to reserve. At least 1, so that a key in debt is refused.
    pub units: u64,
    /// Assumed input tokens.
    pub input: u64,
    /// Assumed output tokens, or units if the cost is not in tokens.
    pub output: u64,
    /// The ratios used.
    pub ratios: ModelRatios,
}

/// The facts about a request and its answer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AnswerFacts<'a> {
    /// Counted bytes of the request body.
    pub request_bytes: u64,
    /// The model named in the request.
    pub request_model: Option<&'a str>,
    /// The model named in the answer.
    pub answer_model: Option<&'a str>,
    /// Requested choices.
    pub choices: u64,
    /// Usage reported in the answer's body, header or trailer, or counted by the gateway (bytes,
    /// milliseconds).
    pub reported: Option<ReportedUsage>,
    /// Events that carried output; 0 if the answer is not a stream.
    pub progress: u64,
    /// Bytes of the answer body.
    pub answer_bytes: u64,
}

/// How an exchange ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerEnding {
    /// No server received the whole request.
    NotSent,
    /// The request was sent, but no response head came: a timeout, a broken connection, or the
    /// client left.
    Silent,
    /// The answer ended normally. `has_body` is false for 1xx, 204, 304 and answers to HEAD.
    Whole {
        /// The answer's status.
        status: StatusCode,
        /// Whether the answer can report usage.
        has_body: bool,
    },
    /// After the head, the client left, the upstream broke off, or the gateway ended the answer.
    Aborted {
        /// The answer's status.
        status: StatusCode,
    },
}

/// The source of a cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CostBasis {
    /// Reported by the upstream.
    Reported,
    /// Counted from bytes and events.
    Counted,
    /// The held units.
    Reserved,
    /// A configured number.
    Fixed,
    /// Nothing is charged.
    Refunded,
    /// No answer came.
    Silent,
    /// The answer was cut short.
    Aborted,
}

impl CostBasis {
    /// The name in logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            CostBasis::Reported => "reported",
            CostBasis::Counted => "counted",
            CostBasis::Reserved => "reserved",
            CostBasis::Fixed => "fixed",
            CostBasis::Refunded => "refunded",
            CostBasis::Silent => "silent",
            CostBasis::Aborted => "aborted",
        }
    }
}

/// The final cost of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActualCost {
    /// Units.
    pub units: u64,
    /// Their source.
    pub basis: CostBasis,
    /// The reported cost exceeded the plausible maximum.
    pub is_implausible: bool,
}

impl ActualCost {
    /// Nothing is charged.
    pub const REFUNDED: ActualCost = ActualCost {
        units: 0,
        basis: CostBasis::Refunded,
        is_implausible: false,
    };
}

impl CostRule {
    /// Estimates the cost to reserve for a request.
    pub fn estimate(&self, inputs: &CostInputs, learned: &LearnedRatios) -> CostEstimate {
        let model = inputs.model.as_deref();
        let ratios = learned.ratios(Some(self.learned_as(model)), &self.first);
        let choices = inputs.choices.max(1) as f64;
        let mean = f64::from(ratios.output);
        let most = inputs.max_output.map(|most| most as f64);
        let output = match self.estimate {
            EstimateKind::Learned => most.map_or(mean, |most| most.min(mean)) * choices,
            EstimateKind::MaxTokens => most.unwrap_or(self.first.output as f64) * choices,
            EstimateKind::Input | EstimateKind::Fixed(_) => 0.0,
        };
        let input = self.input(&ratios, inputs.bytes);
        let output = rounded_up(output);
        let units = match self.estimate {
            EstimateKind::Fixed(units) => units,
            _ => self.cost(model, &plain(input, output)),
        };
        CostEstimate {
            units: units.clamp(1, self.max.max(1)),
            input,
            output,
            ratios,
        }
    }

    /// The cost of a running answer so far; `None` if unknown until the end.
    pub fn seen(&self, ratios: &ModelRatios, facts: &AnswerFacts<'_>) -> Option<u64> {
        let is_counted = matches!(facts.reported, Some(ReportedUsage::Units(_)));
        let is_known = is_counted || facts.progress > 0 && ratios.tokens_per_event.is_some();
        is_known.then(|| {
            let usage = self.counted(ratios, facts);
            self.cost(facts.priced_model(self), &usage).min(self.max)
        })
    }

    /// The final cost of an exchange that holds `held` units.
    pub fn actual(
        &self,
        ending: AnswerEnding,
        ratios: &ModelRatios,
        facts: &AnswerFacts<'_>,
        held: u64,
    ) -> ActualCost {
        let reported = facts.reported.filter(|reported| self.reads(reported));
        let facts = &AnswerFacts { reported, ..*facts };
        let (units, basis) = match ending {
            AnswerEnding::NotSent => (0, CostBasis::Refunded),
            AnswerEnding::Silent => {
                let (units, _) = self.failure(self.on_silence, ratios, facts, held);
                (units, CostBasis::Silent)
            }
            AnswerEnding::Whole { status, has_body } => match facts.reported {
                Some(reported) => (self.reported(facts, &reported), CostBasis::Reported),
                None if !has_body => (0, CostBasis::Refunded),
                None if is_error(status) => self.failure(self.on_error, ratios, facts, held),
                None => self.unreported(ratios, facts, held),
            },
            AnswerEnding::Aborted { status } => match facts.reported {
                None if is_error(status) => self.failure(self.on_error, ratios, facts, held),
                _ => (self.aborted(ratios, facts, held), CostBasis::Aborted),
            },
        };
        ActualCost {
            units: units.min(self.max),
            basis,
            is_implausible: units > self.max,
        }
    }

    /// Learns from a complete answer below 400 with reported usage. From an aborted answer, learns
    /// only what is certain.
    pub fn learn(&self, ending: AnswerEnding, facts: &AnswerFacts<'_>, learned: &LearnedRatios) {
        let (status, is_whole) = match ending {
            AnswerEnding::Whole { status, .. } => (status, true),
            AnswerEnding::Aborted { status } => (status, false),
            AnswerEnding::NotSent | AnswerEnding::Silent => return,
        };
        let Some(reported) = facts.reported.filter(|reported| self.reads(reported)) else {
            return;
        };
        if is_error(status) {
            return;
        }
        let (input, output) = match reported {
            ReportedUsage::Tokens(usage) => (usage.input, usage.output),
            ReportedUsage::Seconds(units) | ReportedUsage::Units(units) => (0, units),
        };
        let model = self.learned_as(facts.request_model);
        learned.take_in(model);
        learned.learn(
            Some(model),
            &AnswerSample {
                request_bytes: facts.request_bytes,
                input,
                output: is_whole.then_some(output.min(self.max)),
                choices: facts.choices,
                events: facts.progress,
            },
        );
    }

    /// The name under which a model is learned: from the price table, else from the request.
    pub fn learned_as<'a>(&'a self, model: Option<&'a str>) -> &'a str {
        match &self.units {
            CostUnits::Money(table) => table.find(model).name,
            _ => model.unwrap_or(super::price::OTHER_MODEL),
        }
    }

    /// Whether the reported usage is in this rule's units.
    fn reads(&self, reported: &ReportedUsage) -> bool {
        matches!(
            (&self.units, reported),
            (
                CostUnits::Tokens(_) | CostUnits::Money(_),
                ReportedUsage::Tokens(_)
            ) | (CostUnits::Whole, ReportedUsage::Units(_))
                | (CostUnits::Seconds, ReportedUsage::Seconds(_))
        )
    }

    /// Input tokens estimated from the request's bytes; 0 if the cost is not in tokens.
    fn input(&self, ratios: &ModelRatios, bytes: u64) -> u64 {
        match self.units {
            CostUnits::Tokens(_) | CostUnits::Money(_) => {
                rounded_up(f64::from(ratios.tokens_per_byte) * bytes as f64)
            }
            CostUnits::Whole | CostUnits::Seconds => 0,
        }
    }

    fn cost(&self, model: Option<&str>, usage: &TokenUsage) -> u64 {
        match &self.units {
            CostUnits::Tokens(weights) => weights.cost(usage),
            CostUnits::Money(table) => table.find(model).price.cost(usage),
            CostUnits::Whole | CostUnits::Seconds => usage.output,
        }
    }

    fn reported(&self, facts: &AnswerFacts<'_>, reported: &ReportedUsage) -> u64 {
        match reported {
            ReportedUsage::Tokens(usage) => self.cost(facts.priced_model(self), usage),
            ReportedUsage::Seconds(units) | ReportedUsage::Units(units) => *units,
        }
    }

    /// The usage reported so far. Uses the counted output if that is larger.
    fn counted(&self, ratios: &ModelRatios, facts: &AnswerFacts<'_>) -> TokenUsage {
        let by_events = ratios.tokens_per_event.map_or(0.0, f64::from) * facts.progress as f64;
        let output = match facts.progress {
            0 => f64::from(ratios.tokens_per_byte) * facts.answer_bytes as f64,
            _ => by_events,
        };
        let is_tokens = matches!(self.units, CostUnits::Tokens(_) | CostUnits::Money(_));
        let output = match is_tokens || facts.progress > 0 {
            true => rounded_up(output),
            false => 0,
        };
        match facts.reported {
            Some(ReportedUsage::Tokens(usage)) => TokenUsage {
                output: usage.output.max(output),
                // Some formats report the input only at the end; estimate it until then.
                input: match usage.input {
                    0 => self.input(ratios, facts.request_bytes),
                    input => input,
                },
                ..usage
            },
            Some(ReportedUsage::Seconds(units) | ReportedUsage::Units(units)) => plain(0, units),
            None => plain(self.input(ratios, facts.request_bytes), output),
        }
    }

    fn aborted(&self, ratios: &ModelRatios, facts: &AnswerFacts<'_>, held: u64) -> u64 {
        let counted = self.cost(facts.priced_model(self), &self.counted(ratios, facts));
        match self.reserved_on_abort {
            true => counted.max(held),
            false => counted,
        }
    }

    fn unreported(
        &self,
        ratios: &ModelRatios,
        facts: &AnswerFacts<'_>,
        held: u64,
    ) -> (u64, CostBasis) {
        let is_tokens = matches!(self.units, CostUnits::Tokens(_) | CostUnits::Money(_));
        let is_countable = match facts.progress {
            0 => is_tokens,
            _ => ratios.tokens_per_event.is_some(),
        };
        match self.unreported {
            UnreportedCost::Fixed(units) => (units, CostBasis::Fixed),
            UnreportedCost::Counted if is_countable => {
                let usage = self.counted(ratios, facts);
                let cost = self.cost(facts.priced_model(self), &usage);
                (cost, CostBasis::Counted)
            }
            UnreportedCost::Counted | UnreportedCost::Reserved => (held, CostBasis::Reserved),
        }
    }

    fn failure(
        &self,
        rule: FailureCost,
        ratios: &ModelRatios,
        facts: &AnswerFacts<'_>,
        held: u64,
    ) -> (u64, CostBasis) {
        match rule {
            FailureCost::Refund => (0, CostBasis::Refunded),
            FailureCost::Reserved => (held, CostBasis::Reserved),
            FailureCost::Input => {
                let counted = match facts.reported {
                    // The gateway counts bytes and time itself, even if the answer fails.
                    Some(ReportedUsage::Units(units)) => plain(0, units),
                    _ => plain(self.input(ratios, facts.request_bytes), 0),
                };
                let cost = self.cost(facts.priced_model(self), &counted);
                (cost, CostBasis::Counted)
            }
        }
    }
}

impl<'a> AnswerFacts<'a> {
    /// The answer's model if the price table lists it, else the request's.
    pub fn priced_model(&self, rule: &CostRule) -> Option<&'a str> {
        let is_listed = |model: &&str| match &rule.units {
            CostUnits::Money(table) => table.find(Some(model)).is_listed,
            _ => true,
        };
        self.answer_model.filter(is_listed).or(self.request_model)
    }
}

fn plain(input: u64, output: u64) -> TokenUsage {
    TokenUsage {
        input,
        output,
        ..TokenUsage::default()
    }
}

fn is_error(status: StatusCode) -> bool {
    status.as_u16() >= 400
}

/// Rounds up to a whole number of at most [`MAX_VALUE`].
fn rounded_up(value: f64) -> u64 {
    // The cast saturates, and maps NaN to 0.
    (value.ceil() as u64).min(MAX_VALUE)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OK: AnswerEnding = AnswerEnding::Whole {
        status: StatusCode::OK,
        has_body: true,
    };

    fn rule() -> CostRule {
        CostRule {
            units: CostUnits::Tokens(TokenPrices::ONE_EACH),
            estimate: EstimateKind::Learned,
            first: FirstRatios {
                output: 1_000,
                tokens_per_event: Some(1),
            },
            grow: Decimal::parse("0.25").expect("a share"),
            reserved_on_abort: false,
            on_error: FailureCost::Refund,
            on_silence: FailureCost::Input,
            unreported: UnreportedCost::Counted,
            max: 1_000_000_000,
        }
    }

    fn learned() -> LearnedRatios {
        LearnedRatios::new([], 1_000_000_000)
    }

    fn ratios() -> ModelRatios {
        learned().ratios(None, &rule().first)
    }

    fn inputs(body: &str) -> CostInputs {
        CostInputs::read(body.as_bytes())
    }

    fn tokens(input: u64, output: u64) -> Option<ReportedUsage> {
        Some(ReportedUsage::Tokens(plain(input, output)))
    }

    /// A request of 400 bytes, or 100 tokens.
    fn facts() -> AnswerFacts<'static> {
        AnswerFacts {
            request_bytes: 400,
            choices: 1,
            ..AnswerFacts::default()
        }
    }

    fn actual(
        rule: &CostRule,
        ending: AnswerEnding,
        facts: &AnswerFacts<'_>,
    ) -> (u64, &'static str) {
        let cost = rule.actual(ending, &ratios(), facts, 700);
        (cost.units, cost.basis.as_str())
    }

    #[test]
    fn an_estimate_is_the_input_by_its_bytes_and_the_mean_output() {
        let body = format!(
            r#"{{"n":2,"max_tokens":300,"messages":"{}"}}"#,
            "a b ".repeat(100)
        );
        let bytes = body.len() as u64;
        let of = |estimate| CostRule { estimate, ..rule() }.estimate(&inputs(&body), &learned());
        let input = bytes.div_ceil(4);
        assert_eq!(of(EstimateKind::Learned).units, input + 600);
        assert_eq!(of(EstimateKind::MaxTokens).units, input + 600);
        assert_eq!(of(EstimateKind::Input).units, input);
        assert_eq!(of(EstimateKind::Fixed(500)).units, 500);
        assert_eq!(
            of(EstimateKind::Fixed(0)).units,
            1,
            "a key in debt is refused"
        );
        let unbounded = rule().estimate(&inputs("{}"), &learned());
        assert_eq!((unbounded.input, unbounded.output), (1, 1_000));
    }

    #[test]
    fn the_mean_is_learned_per_model_and_bounded_by_the_request() {
        let (rule, learned) = (rule(), learned());
        let answer = AnswerFacts {
            request_model: Some("m"),
            reported: tokens(100, 5_000),
            ..facts()
        };
        for _ in 0..20 {
            rule.learn(OK, &answer, &learned);
        }
        let error = AnswerEnding::Whole {
            status: StatusCode::BAD_REQUEST,
            has_body: true,
        };
        rule.learn(
            error,
            &AnswerFacts {
                request_model: Some("x"),
                ..answer
            },
            &learned,
        );
        let estimate = |body| rule.estimate(&inputs(body), &learned);
        assert_eq!(estimate(r#"{"model":"m"}"#).output, 5_000);
        assert_eq!(estimate(r#"{"model":"m","max_tokens":64}"#).output, 64);
        assert_eq!(estimate(r#"{"model":"x"}"#).output, 1_000);
        assert_eq!(estimate(r#"{"model":"m"}"#).ratios.answers, 20);
    }

    #[test]
    fn every_ending_has_its_cost() {
        let rule = rule();
        let reported = AnswerFacts {
            reported: tokens(90, 30),
            ..facts()
        };
        let stream = AnswerFacts {
            progress: 300,
            answer_bytes: 60_000,
            ..facts()
        };
        let error = |status| AnswerEnding::Whole {
            status,
            has_body: true,
        };
        let aborted = AnswerEnding::Aborted {
            status: StatusCode::OK,
        };
        let empty = AnswerEnding::Whole {
            status: StatusCode::NO_CONTENT,
            has_body: false,
        };
        for (ending, facts, cost, basis) in [
            (OK, reported, 120, "reported"),
            (
                error(StatusCode::INTERNAL_SERVER_ERROR),
                reported,
                120,
                "reported",
            ),
            (OK, stream, 400, "counted"),
            (
                OK,
                AnswerFacts {
                    answer_bytes: 800,
                    ..facts()
                },
                300,
                "counted",
            ),
            (error(StatusCode::BAD_REQUEST), facts(), 0, "refunded"),
            (AnswerEnding::NotSent, facts(), 0, "refunded"),
            (AnswerEnding::Silent, facts(), 100, "silent"),
            (empty, facts(), 0, "refunded"),
            (
                aborted,
                AnswerFacts {
                    progress: 50,
                    ..facts()
                },
                150,
                "aborted",
            ),
            (
                aborted,
                AnswerFacts {
                    progress: 50,
                    reported: tokens(25, 1),
                    ..facts()
                },
                75,
                "aborted",
            ),
            (
                aborted,
                AnswerFacts {
                    progress: 3,
                    reported: tokens(25, 8),
                    ..facts()
                },
                33,
                "aborted",
            ),
            (aborted, facts(), 100, "aborted"),
        ] {
            assert_eq!(actual(&rule, ending, &facts), (cost, basis), "{ending:?}");
        }
    }

    #[test]
    fn what_an_early_end_costs_is_configured() {
        let error = AnswerEnding::Whole {
            status: StatusCode::BAD_GATEWAY,
            has_body: true,
        };
        let aborted = AnswerEnding::Aborted {
            status: StatusCode::OK,
        };
        let held = CostRule {
            reserved_on_abort: true,
            on_error: FailureCost::Reserved,
            on_silence: FailureCost::Refund,
            unreported: UnreportedCost::Fixed(7),
            ..rule()
        };
        assert_eq!(actual(&held, error, &facts()), (700, "reserved"));
        assert_eq!(actual(&held, AnswerEnding::Silent, &facts()), (0, "silent"));
        assert_eq!(actual(&held, OK, &facts()), (7, "fixed"));
        assert_eq!(actual(&held, aborted, &facts()), (700, "aborted"));
        let more = AnswerFacts {
            progress: 5_000,
            ..facts()
        };
        assert_eq!(actual(&held, aborted, &more), (5_100, "aborted"));
        let reserved = CostRule {
            unreported: UnreportedCost::Reserved,
            on_error: FailureCost::Input,
            ..rule()
        };
        assert_eq!(actual(&reserved, OK, &facts()), (700, "reserved"));
        assert_eq!(actual(&reserved, error, &facts()), (100, "counted"));
    }

    #[test]
    fn more_than_is_believed_is_the_most_that_is() {
        let rule = CostRule {
            max: 1_000,
            ..rule()
        };
        let huge = AnswerFacts {
            reported: tokens(MAX_VALUE, MAX_VALUE),
            ..facts()
        };
        let cost = rule.actual(OK, &ratios(), &huge, 0);
        assert_eq!((cost.units, cost.is_implausible), (1_000, true));
    }

    #[test]
    fn a_stream_is_seen_by_its_events_and_a_whole_answer_is_not() {
        let rule = rule();
        let stream = AnswerFacts {
            progress: 50,
            answer_bytes: 9_999,
            ..facts()
        };
        assert_eq!(rule.seen(&ratios(), &stream), Some(150));
        assert_eq!(rule.seen(&ratios(), &facts()), None);
        let cumulative = AnswerFacts {
            reported: tokens(80, 90),
            ..stream
        };
        assert_eq!(rule.seen(&ratios(), &cumulative), Some(170));
        let unknown = ModelRatios {
            tokens_per_event: None,
            ..ratios()
        };
        assert_eq!(rule.seen(&unknown, &stream), None);
    }

    #[test]
    fn points_and_bytes_are_the_whole_cost() {
        let rule = CostRule {
            units: CostUnits::Whole,
            ..rule()
        };
        let points = |units| AnswerFacts {
            reported: Some(ReportedUsage::Units(units)),
            ..facts()
        };
        assert_eq!(actual(&rule, OK, &points(46)), (46, "reported"));
        assert_eq!(
            actual(&rule, OK, &facts()),
            (700, "reserved"),
            "nothing to count by"
        );
        assert_eq!(
            actual(
                &rule,
                OK,
                &AnswerFacts {
                    reported: tokens(1, 2),
                    ..facts()
                }
            )
            .1,
            "reserved"
        );
        assert_eq!(rule.seen(&ratios(), &points(46)), Some(46));
        let aborted = AnswerEnding::Aborted {
            status: StatusCode::OK,
        };
        assert_eq!(actual(&rule, aborted, &points(46)), (46, "aborted"));
        let learned = learned();
        for _ in 0..20 {
            rule.learn(OK, &points(40), &learned);
        }
        assert_eq!(rule.estimate(&inputs("{}"), &learned).units, 40);
    }

    #[test]
    fn seconds_are_a_cost_of_seconds_and_unreported_for_tokens() {
        let seconds = AnswerFacts {
            reported: Some(ReportedUsage::Seconds(12)),
            answer_bytes: 400,
            ..facts()
        };
        let rule_of_seconds = CostRule {
            units: CostUnits::Seconds,
            ..rule()
        };
        assert_eq!(actual(&rule_of_seconds, OK, &seconds), (12, "reported"));
        assert_eq!(actual(&rule(), OK, &seconds), (200, "counted"));
    }

    #[test]
    fn the_answers_model_has_the_price_if_the_table_lists_it() {
        let price = |output: &str| {
            let prices = super::super::PartPrices {
                input: Decimal::parse("0"),
                output: Decimal::parse(output),
                ..Default::default()
            };
            super::super::ModelPrice {
                prices: prices.or(Decimal::ZERO),
                long: None,
            }
        };
        let table = PriceTable::new(vec![
            ("small".to_owned(), price("1")),
            ("large*".to_owned(), price("10")),
        ]);
        let rule = CostRule {
            units: CostUnits::Money(Arc::new(table.expect("a table"))),
            ..rule()
        };
        let of = |request_model, answer_model| {
            let facts = AnswerFacts {
                request_model,
                answer_model,
                reported: tokens(5, 100),
                ..facts()
            };
            actual(&rule, OK, &facts).0
        };
        assert_eq!(of(Some("small"), Some("large-2026")), 1_000);
        assert_eq!(
            of(Some("small"), Some("small-2026")),
            100,
            "the answer's is not listed"
        );
        assert_eq!(of(Some("who knows"), None), 1_000, "as the most expensive");
    }
}
