//! The scripts that run in Redis: their text, the arguments of a call, and the reply.

use redis::Value;

use crate::budget::{
    lease::{LeaseAlgorithm, LeaseCall, LeaseReport, LeaseTerms, Reply},
    redis::{Failure, Script},
};

/// One script for each form of state.
#[derive(Debug)]
pub(super) struct Scripts {
    pub(super) nodes: Script,
    bucket: Script,
    window: Script,
    log: Script,
    slots: Script,
}

/// A script that counts units, prefixed with the functions for request lists.
macro_rules! counting {
    ($file:literal) => {
        concat!(
            include_str!("../state.lua"),
            include_str!("../requests.lua"),
            include_str!($file)
        )
    };
}

impl Scripts {
    pub(super) fn new() -> Scripts {
        Scripts {
            nodes: Script::new(include_str!("../nodes.lua")),
            bucket: Script::new(counting!("../bucket.lua")),
            window: Script::new(counting!("../window.lua")),
            log: Script::new(counting!("../log.lua")),
            slots: Script::new(concat!(
                include_str!("../requests.lua"),
                include_str!("../slots.lua")
            )),
        }
    }

    pub(super) fn of(&self, algorithm: LeaseAlgorithm) -> &Script {
        match algorithm {
            LeaseAlgorithm::Bucket => &self.bucket,
            LeaseAlgorithm::Fixed | LeaseAlgorithm::Sliding => &self.window,
            LeaseAlgorithm::Log => &self.log,
            LeaseAlgorithm::Slots => &self.slots,
        }
    }
}

/// The index of the argument with this gateway's memory.
pub(super) fn memory_at(algorithm: LeaseAlgorithm) -> usize {
    match algorithm {
        LeaseAlgorithm::Log => 5,
        _ => 10,
    }
}

/// The script arguments of a call: decimal text, except for the memory.
pub(super) fn arguments(
    terms: &LeaseTerms,
    call: &LeaseCall,
    (id, number): (&str, u64),
    gateways: f64,
) -> Vec<Vec<u8>> {
    let memory = call.memory.bytes(terms.algorithm, gateways);
    let mut arguments = match terms.algorithm {
        LeaseAlgorithm::Log => vec![
            terms.capacity.to_string().into(),
            terms.span_us.to_string().into(),
            call.need.to_string().into(),
            id.into(),
            (number & u64::from(u32::MAX)).to_string().into(),
            memory,
        ],
        algorithm => {
            let [second, third] = match algorithm {
                LeaseAlgorithm::Bucket => {
                    [terms.rate.to_string(), terms.generation_us().to_string()]
                }
                _ => {
                    let slides = u8::from(algorithm == LeaseAlgorithm::Sliding);
                    [terms.span_us.to_string(), slides.to_string()]
                }
            };
            vec![
                terms.capacity.to_string().into(),
                second.into(),
                third.into(),
                call.need.to_string().into(),
                match call.unit {
                    1 => call.want.to_string().into(),
                    unit => format!("{unit}*{}", call.want / unit.max(1)).into(),
                },
                call.part.to_string().into(),
                call.arrivals.to_string().into(),
                // an estimate; fewer digits save bytes
                format!("{:.3}", call.rate).into(),
                call.since_us.to_string().into(),
                call.memory_us.to_string().into(),
                memory,
            ]
        }
    };
    for report in &call.reports {
        let (kind, generation, tokens) = match report {
            LeaseReport::Spent { generation, tokens } => {
                (0, i64::from(*generation), tokens.to_string())
            }
            LeaseReport::Returned { generation, tokens } => {
                (1, i64::from(*generation), tokens.to_string())
            }
            LeaseReport::Debt { tokens, window } => {
                (2, window.map_or(-1, i64::from), tokens.to_string())
            }
            LeaseReport::Refund { tokens } => (5, -1, tokens.to_string()),
            LeaseReport::Charge { tokens } => (6, -1, tokens.to_string()),
            LeaseReport::Out { generation, tokens } => {
                (3, i64::from(*generation), tokens.to_string())
            }
            LeaseReport::Unused { tokens, origin } => (
                4,
                i64::from(origin.generation),
                format!("{tokens} {} {}", origin.room, origin.moment_us),
            ),
        };
        let words = [kind.to_string(), generation.to_string(), tokens];
        arguments.extend(words.map(String::into_bytes));
    }
    arguments
}

/// Parses a script's reply.
pub(super) fn reply(value: &Value) -> Result<Reply, Failure> {
    let Value::Array(items) = value else {
        return Err(Failure::Malformed);
    };
    let mut numbers = [0_u64; 10];
    if items.len() != numbers.len() {
        return Err(Failure::Malformed);
    }
    for (number, item) in numbers.iter_mut().zip(items) {
        let Value::Int(value) = item else {
            return Err(Failure::Malformed);
        };
        *number = u64::try_from(*value).map_err(|_| Failure::Malformed)?;
    }
    let [
        need,
        want,
        generation,
        valid_us,
        pool,
        wait_us,
        marks,
        demand,
        state @ ..,
    ] = numbers;
    // the incarnation, and in the bits above it whether gateways disagree
    let incarnation = u16::try_from(marks & u64::from(u16::MAX));
    Ok(Reply {
        need,
        want,
        generation: u32::try_from(generation).map_err(|_| Failure::Malformed)?,
        valid_us,
        pool,
        wait_us,
        incarnation: incarnation.map_err(|_| Failure::Malformed)?,
        disagrees: marks > u64::from(u16::MAX),
        demand,
        state,
    })
}
