//! This gateway's memory of a key, so that data loss in Redis costs almost nothing.
//!
//! The gateway that receives a grant sees it, so the last caller knows what the store had counted.
//! The greatest memory of all gateways, each aged to now, is the state before the loss. A state has
//! an *incarnation*: a number that changes in a loss. Each call reports the incarnation that this
//! gateway saw last and its count; the script merges where they differ (`state.lua`).

use std::collections::VecDeque;

use super::{
    reply::Reply,
    terms::{LeaseAlgorithm, LeaseTerms},
};

/// Clocks drift, and a call may be executed some time after it was sent: a key this close to its
/// end may already be gone.
const MARGIN_NS: u64 = 200_000_000;
/// Most calls of one key whose log entries are remembered.
const MAX_ENTRIES: usize = 1024;

/// A key's state in the last reply.
#[derive(Clone, Debug, Default)]
pub(super) struct ReplyMemory {
    /// 0 before the first reply.
    incarnation: u16,
    /// Units spent; for windows, the counts of this one and of the one before.
    counts: [f64; 2],
    window: u32,
    at_ns: u64,
    sent_ns: u64,
    /// Until then the key cannot have expired.
    until_ns: u64,
    /// Log: this gateway's grants, oldest first.
    entries: VecDeque<LogEntry>,
    /// The log has lost them and needs a report: since then.
    lost_ns: Option<u64>,
}

/// Units that one call added to a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LogEntry {
    call: u32,
    units: u16,
    at_ns: u64,
}

/// The part of it that a call reports.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recollection {
    /// 0: no reply yet.
    pub incarnation: u16,
    /// Modulo 256.
    pub window: u8,
    /// Negative: the key may have expired.
    pub spent: f32,
    /// Count of the previous window.
    pub before: f32,
    /// For a log that has lost them: call, units, age in µs.
    pub entries: Vec<(u32, u16, u64)>,
}

impl ReplyMemory {
    /// Stores the reply to a call sent at `sent_ns`. Returns whether data was lost since the last
    /// reply.
    pub(super) fn saw(
        &mut self,
        now_ns: u64,
        sent_ns: u64,
        terms: &LeaseTerms,
        reply: &Reply,
    ) -> bool {
        if self.knows_later(sent_ns) {
            // a late reply to an earlier call is older knowledge
            return false;
        }
        let is_lost = self.misses(sent_ns, terms, reply);
        let [first, second] = reply.state.map(|count| count as f64);
        self.counts = match terms.algorithm {
            LeaseAlgorithm::Bucket => [first * terms.rate, 0.0],
            _ => [first, second],
        };
        let lives_us = match terms.algorithm {
            LeaseAlgorithm::Bucket => {
                reply.state[0].saturating_add(terms.generation_us().saturating_mul(2))
            }
            LeaseAlgorithm::Fixed => reply.valid_us,
            LeaseAlgorithm::Sliding => reply.valid_us.saturating_add(terms.span_us),
            // after a loss the log is empty until the next call reports its entries
            _ if is_lost || reply.pool < terms.capacity => terms.span_us,
            _ => 0,
        };
        let lives_ns = lives_us.saturating_mul(1000).saturating_sub(MARGIN_NS);
        self.until_ns = sent_ns.saturating_add(lives_ns);
        // a call that was sent before the loss was noticed did not report them
        if self.lost_ns.is_some_and(|lost_ns| lost_ns <= sent_ns) {
            self.lost_ns = None;
        }
        if is_lost && !self.entries.is_empty() {
            self.lost_ns = Some(now_ns);
        }
        (self.incarnation, self.window) = (reply.incarnation, reply.generation);
        (self.at_ns, self.sent_ns) = (now_ns, sent_ns);
        if terms.algorithm == LeaseAlgorithm::Log && reply.need > 0 {
            self.remember(now_ns, terms, reply.generation, reply.need);
        }
        is_lost
    }

    /// Whether a call sent later than this one was answered.
    pub(super) fn knows_later(&self, sent_ns: u64) -> bool {
        sent_ns < self.sent_ns
    }

    /// Whether a reply's state is not the one seen before, though that should have lasted.
    fn misses(&self, sent_ns: u64, terms: &LeaseTerms, reply: &Reply) -> bool {
        if self.incarnation == 0 || self.incarnation == reply.incarnation {
            return false;
        }
        let windows = reply.generation.wrapping_sub(self.window);
        match terms.algorithm {
            LeaseAlgorithm::Fixed => windows == 0,
            LeaseAlgorithm::Sliding => windows <= 1,
            _ => sent_ns < self.until_ns,
        }
    }

    fn remember(&mut self, now_ns: u64, terms: &LeaseTerms, call: u32, units: u64) {
        let horizon_ns = now_ns.saturating_sub(terms.span_us.saturating_mul(1000));
        while self
            .entries
            .front()
            .is_some_and(|entry| entry.at_ns < horizon_ns)
            || self.entries.len() >= MAX_ENTRIES
        {
            self.entries.pop_front();
        }
        let units = u16::try_from(units).unwrap_or(u16::MAX);
        let at_ns = now_ns;
        self.entries.push_back(LogEntry { call, units, at_ns });
    }

    /// Units of a log were returned.
    pub(super) fn returned(&mut self, call: u32, units: u64) {
        let mut entries = self.entries.iter_mut();
        if let Some(entry) = entries.find(|entry| entry.call == call) {
            let units = u16::try_from(units).unwrap_or(u16::MAX);
            entry.units = entry.units.saturating_sub(units);
        }
    }

    /// The content for the next call.
    pub(super) fn recollection(&self, now_ns: u64, terms: &LeaseTerms) -> Recollection {
        let age_us = |at_ns: u64| now_ns.saturating_sub(at_ns).div_euclid(1000);
        let is_gone = now_ns >= self.until_ns;
        let mut entries = Vec::new();
        let [spent, before] = match terms.algorithm {
            _ if is_gone => [-1.0, 0.0],
            // aged by no more than the elapsed time
            LeaseAlgorithm::Bucket => {
                let [spent, _] = self.counts;
                [
                    (spent - terms.rate * age_us(self.at_ns) as f64).max(0.0),
                    0.0,
                ]
            }
            LeaseAlgorithm::Log => {
                let kept = self
                    .entries
                    .iter()
                    .filter(|entry| entry.units > 0 && age_us(entry.at_ns) < terms.span_us);
                let units: f64 = kept.clone().map(|entry| f64::from(entry.units)).sum();
                if self.tells() {
                    entries.extend(kept.map(|it| (it.call, it.units, age_us(it.at_ns))));
                }
                [units, 0.0]
            }
            _ => self.counts,
        };
        Recollection {
            incarnation: self.incarnation,
            window: self.window.to_le_bytes()[0],
            spent: spent as f32,
            before: before as f32,
            entries,
        }
    }

    /// Whether to report to the log at once.
    pub(super) fn tells(&self) -> bool {
        self.lost_ns.is_some()
    }

    /// Whether a store that forgot the key now would need a report.
    pub(super) fn matters(&self, now_ns: u64, terms: &LeaseTerms) -> bool {
        self.incarnation != 0 && now_ns < self.until_ns && {
            let told = self.recollection(now_ns, terms);
            told.spent >= 1.0 || told.before >= 1.0
        }
    }
}

impl Recollection {
    /// In the scripts' format; `run` is filled in where the connection is known.
    pub fn bytes(&self, algorithm: LeaseAlgorithm, gateways: f64) -> Vec<u8> {
        let gateways = (gateways as u64).clamp(1, 255).to_le_bytes()[0];
        let mut bytes = Vec::with_capacity(16);
        bytes.extend(self.incarnation.to_le_bytes());
        bytes.extend([self.window, gateways]);
        bytes.extend([0; 4]);
        bytes.extend(self.spent.to_le_bytes());
        match algorithm {
            LeaseAlgorithm::Fixed | LeaseAlgorithm::Sliding => {
                bytes.extend(self.before.to_le_bytes())
            }
            _ => {}
        }
        for (call, units, age_us) in &self.entries {
            bytes.extend(call.to_le_bytes());
            bytes.extend(units.to_le_bytes());
            bytes.extend(age_us.to_le_bytes().into_iter().take(6));
        }
        bytes
    }

    /// The position of the server's run in these bytes.
    pub const RUN: std::ops::Range<usize> = 4..8;
}
