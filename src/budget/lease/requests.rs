//! The requests that wait for one call: the cost of each, in order of arrival.

use std::{collections::VecDeque, fmt};

/// Most runs of equal requests in one call; requests behind them wait for the next call.
const MAX_RUNS: usize = 32;

/// Request costs, run-length encoded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Cost and count.
    runs: Vec<(u64, u64)>,
}

impl Requests {
    /// Appends a request; false if there is no room for it.
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

    /// Takes the requests for one call from a queue.
    pub fn begin<T>(queue: &mut VecDeque<T>, cost: impl Fn(&T) -> u64) -> (VecDeque<T>, Requests) {
        let mut requests = Requests::default();
        let fit = queue.iter().take_while(|item| requests.push(cost(item)));
        let fit = fit.count();
        let rest = queue.split_off(fit);
        (std::mem::replace(queue, rest), requests)
    }

    /// The units granted from `whole`, and the cost of the first request that does not fit. Same
    /// rule as `requests.lua`: only whole requests, and one that does not fit leaves its units to
    /// those behind it.
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

/// In the format of `requests.lua`.
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
