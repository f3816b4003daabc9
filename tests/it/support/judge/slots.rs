//! Requests in flight: how many are at work at once, and who was refused while there was room.

use super::{Fault, Record, Time, Verdict};

/// A request at work at its origin: from when until when, and its slots.
pub type AtWork = (Time, Time, u64);

/// The most slots in use at once, and when: what the origin saw, not clients.
pub fn most_at_work(at_work: &[AtWork]) -> (u64, Time) {
    let begun = at_work.iter().map(|&(from, _, slots)| (from, 1, slots));
    // one that ends in the moment in which another begins may have ended before
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

/// More at work than there are slots.
pub fn beyond(limit: u64, at_work: &[AtWork]) -> Option<Fault> {
    let (most, at) = most_at_work(at_work);
    (most > limit).then(|| Fault::Beyond {
        excess: most - limit,
        from: at,
        to: at,
        requests: Vec::new(),
    })
}

/// Requests that were refused though a slot was free: not even all that may have been in flight, or had ended `linger`
/// before, fill the limit.
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
