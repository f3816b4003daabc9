//! The body of an answer as it passes: reservations grow with a stream, and a stream whose key has
//! nothing left may end.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::{
    held_costs::{HeldCost, HeldCosts},
    plan::LimitRule,
};
use crate::{config::CostPreset, cost::UsageMeter};

/// A stream whose key has nothing left is broken off if no event ends within this time.
const CUT_PATIENCE: Duration = Duration::from_secs(1);

/// Where a stream ends because its key has nothing left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StreamCut {
    /// Behind this many bytes of the piece, an error event follows.
    After(usize, Bytes),
    /// At once: no event has ended for too long.
    Now,
}

impl HeldCosts {
    /// The next piece of the answer's body. Says if the stream ends here.
    pub(super) fn feed(&mut self, piece: &[u8]) -> Option<StreamCut> {
        self.answer_bytes = self.answer_bytes.saturating_add(piece.len() as u64);
        let mut boundary = None;
        for meter in &mut self.meters {
            boundary = meter.feed(piece).or(boundary);
        }
        let mut now_ns = None;
        for index in 0..self.held.len() {
            if let Some(units) = self.growth(index) {
                let now_ns = *now_ns.get_or_insert_with(|| self.now_ns());
                self.grow(index, units, now_ns);
            }
        }
        match self.cuts() {
            true => self.cut(boundary),
            false => None,
        }
    }

    /// The units by which a reservation grows now.
    fn growth(&self, index: usize) -> Option<u64> {
        let held = self.held.get(index)?;
        let rule = &held.rule.cost.as_ref()?.settings.rule;
        let seen = rule.seen(&held.ratios, &self.facts(held))?;
        let units = held.reservation.growth(seen, rule.grow);
        (units > 0).then_some(units)
    }

    fn grow(&mut self, index: usize, units: u64, now_ns: u64) {
        let Some(held) = self.held.get(index) else {
            return;
        };
        let forgiven = self.charge(held, units, now_ns);
        if let Some(cost) = &held.rule.cost {
            cost.metrics.grown.increment(units);
            cost.metrics.in_flight.increment(units as f64);
        }
        if let Some(held) = self.held.get_mut(index) {
            held.reservation.grow(units, forgiven, now_ns);
        }
    }

    /// Whether a limit ends streams whose key has nothing left.
    fn cuts(&self) -> bool {
        let cuts = |held: &HeldCost| {
            let settings = held.rule.cost.as_ref().map(|cost| &cost.settings);
            settings.is_some_and(|settings| settings.cut_empty)
        };
        self.held.iter().any(cuts)
    }

    fn cut(&mut self, boundary: Option<usize>) -> Option<StreamCut> {
        let now_ns = self.now_ns();
        let index = self.held.iter().position(|held| {
            let cost = held.rule.cost.as_ref();
            let cuts = cost.is_some_and(|cost| cost.settings.cut_empty);
            let meter = held.meter.and_then(|meter| self.meters.get(meter));
            cuts && meter.is_some_and(UsageMeter::is_event_stream)
                && self.left(held, now_ns) == Some(0)
        })?;
        let spent = *self.spent.get_or_insert_with(Instant::now);
        let held = self.held.get(index)?;
        let cost = held.rule.cost.as_ref()?;
        let cut = match boundary {
            Some(end) => StreamCut::After(end, last_event(cost.settings.preset, &held.rule)),
            None if spent.elapsed() >= CUT_PATIENCE => StreamCut::Now,
            None => return None,
        };
        cost.metrics.cut.increment(1);
        Some(cut)
    }
}

/// The event that tells the client why its stream ends.
fn last_event(preset: Option<CostPreset>, rule: &LimitRule) -> Bytes {
    let limit = match rule.settings.disclose {
        true => rule.name.as_str(),
        false => "limit",
    };
    let message = format!("{limit} is spent: the stream ends here");
    let (event, error) = match preset {
        Some(CostPreset::Anthropic) => (
            "event: error\n",
            serde_json::json!({
                "type": "error",
                "error": {"type": "rate_limit_error", "message": message},
            }),
        ),
        Some(CostPreset::Gemini) => (
            "",
            serde_json::json!({
                "error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "message": message},
            }),
        ),
        _ => (
            "",
            serde_json::json!({
                "error": {
                    "message": message,
                    "type": "tokens",
                    "param": null,
                    "code": "budget_exceeded",
                },
            }),
        ),
    };
    Bytes::from(format!("{event}data: {error}\n\n"))
}
