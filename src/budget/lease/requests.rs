//! The requests that wait for one call: what each costs, in the order in which they came.

use std::{collections::VecDeque, fmt};

/// The most groups of equal requests, one after the other, that one call asks for; those behind them wait for the next call.
const MAX_RUNS: usize = 32;

/// Costs of requests, as runs of equal ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Cost and how many.
    runs: Vec<(u64, u64)>,
}

impl Requests {
    /// Appends a request; false where there is no room for it.
    pub fn push(&mut self, cost: u64) -> bool {
        if let Some((_, count)) = self.runs.last_mut().filter(|(known, _)| *known == cost) {
            *count = count.saturating_add(1);
            return true;
        }
        let has_room = self.runs.len() < MAX_RUNS;
        if has_room {
            self.runs.push((cost, 1));
        }
        has_room
    }

    /// Takes the requests out of a queue that one call asks for.
    pub fn begin<T>(queue: &mut VecDeque<T>, cost: impl Fn(&T) -> u64) -> (VecDeque<T>, Requests) {
        let mut requests = Requests::default();
        let fit = queue.iter().take_while(|item| requests.push(cost(item)));
        let fit = fit.count();
        let rest = queue.split_off(fit);
        (std::mem::replace(queue, rest), requests)
    }

    /// The units that are granted where there are so many whole ones, and the cost of the first request that does not fit.
    /// The same as `requests.lua`: whole requests only, and one that does not fit leaves its units to those behind it.
    pub fn grant(&self, whole: u64) -> (u64, Option<u64>) {
        let (mut granted, mut refused) = (0_u64, None);
        for &(cost, count) in &self.runs {
            let fit = whole
                .saturating_sub(granted)
                .checked_div(cost)
                .unwrap_or(count)
                .min(count);
            if fit < count {
                refused = refused.or(Some(cost));
            }
            granted = granted.saturating_add(fit.saturating_mul(cost));
        }
        (granted, refused)
    }
}

impl FromIterator<u64> for Requests {
    fn from_iter<T: IntoIterator<Item = u64>>(costs: T) -> Requests {
        let mut requests = Requests::default();
        costs.into_iter().all(|cost| requests.push(cost));
        requests
    }
}

/// As `requests.lua` reads it.
impl fmt::Display for Requests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.runs[..] {
            [] => f.write_str("0"),
            [(1, count)] => write!(f, "{count}"),
            _ => {
                for (index, (cost, count)) in self.runs.iter().enumerate() {
                    let space = if index > 0 { " " } else { "" };
                    write!(f, "{space}{cost}*{count}")?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_does_not_fit_leaves_its_units_to_those_behind_it() {
        let requests = Requests::from_iter([1, 20, 20, 1, 1, 5]);
        assert_eq!(requests.to_string(), "1*1 20*2 1*2 5*1");
        assert_eq!(requests.grant(100), (48, None));
        assert_eq!(requests.grant(30), (28, Some(20)));
        assert_eq!(requests.grant(19), (8, Some(20)));
        assert_eq!(requests.grant(0), (0, Some(1)));
    }

    #[test]
    fn requests_of_one_unit_are_a_number() {
        assert_eq!(Requests::default().to_string(), "0");
        assert_eq!(Requests::from_iter([1; 7]).to_string(), "7");
        assert_eq!(Requests::from_iter([3; 7]).to_string(), "3*7");
    }

    #[test]
    fn the_list_is_bounded() {
        let costs = (0..1_000).map(|turn| 1 + turn % 2);
        let requests = Requests::from_iter(costs);
        assert_eq!(requests.runs.len(), MAX_RUNS);
    }
}
