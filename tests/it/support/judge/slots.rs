//! Requests in flight: the most at once, and rejections while slots were free.

use super::{Fault, Record, Time, Verdict};

/// A request at its origin: start, end and slots.
pub type AtWork = (Time, Time, u64);

/// The most slots in use at once, and when, as the origin saw it.
pub fn most_at_work(at_work: &[AtWork]) -> (u64, Time) {
    let begun = at_work.iter().map(|&(from, _, slots)| (from, 1, slots));
    // a request that ends at the moment when another begins may have ended first
    let ended = at_work.iter().map(|&(_, to, slots)| (to, 0, slots));
    let mut changes: Vec<(Time, u8, u64)> = begun.chain(ended).collect();
    changes.sort_unstable();
    let (mut now, mut most) = (0_u64, (0, 0));
    for (time, begins, slots) in changes {
        if begins == 1 {
            now += slots;
        } else {
            now -= slots;
        }
        if now > most.0 {
            most = (now, time);
        }
    }
    most
}

/// More slots in use than the limit allows.
pub fn beyond(limit: u64, at_work: &[AtWork]) -> Option<Fault> {
    let (most, at) = most_at_work(at_work);
    (most > limit).then(|| Fault::Beyond {
        excess: most - limit,
        from: at,
        to: at,
        requests: Vec::new(),
    })
}

/// Requests that were rejected although a slot was free. Requests count if they may have been in
/// flight, or ended less than `linger` before.
pub fn refused(limit: u64, history: &[Record], linger: Time) -> Vec<Fault> {
    let held = |refused: &Record| -> u64 {
        let may_hold = history.iter().filter(|record| match record.verdict {
            Verdict::Refused => false,
            Verdict::Admitted => {
                record.start <= refused.end && record.end + linger >= refused.start
            }
            Verdict::Neither => record.start <= refused.end,
        });
        may_hold.map(|record| record.cost).sum()
    };
    let refused = history.iter().enumerate();
    refused
        .filter(|(_, record)| record.verdict == Verdict::Refused)
        .filter(|(_, record)| held(record) + record.cost <= limit)
        .map(|(request, _)| Fault::WronglyRefused { request, since: 0 })
        .collect()
}
