//! Recent counts of requests and rejections, so that the page shows the time before it was opened.

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use serde_json::{Value, json};

/// Requests and rejections up to a moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Point {
    pub(super) at: SystemTime,
    pub(super) requests: u64,
    pub(super) rejected: u64,
}

/// Recent counts, so that the page shows the time before it was opened.
#[derive(Debug, Default)]
pub(super) struct StatusHistory(Mutex<VecDeque<Point>>);

/// Points kept: a quarter of an hour.
const POINTS: usize = 90;

impl StatusHistory {
    pub(super) fn add(&self, point: Point) {
        let mut points = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if points.len() >= POINTS {
            points.pop_front();
        }
        points.push_back(point);
    }

    pub(super) fn json(&self) -> Vec<Value> {
        let points = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let json = |point: &Point| {
            let at = point.at.duration_since(UNIX_EPOCH).unwrap_or_default();
            json!({
                "at_seconds": at.as_secs_f64(),
                "requests": point.requests,
                "rejected": point.rejected,
            })
        };
        points.iter().map(json).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_is_bounded() {
        let history = StatusHistory::default();
        for requests in 0..1_000 {
            let (at, rejected) = (UNIX_EPOCH, 0);
            history.add(Point {
                at,
                requests,
                rejected,
            });
        }
        let kept = history.json();
        assert_eq!((kept.len(), &kept[0]["requests"]), (POINTS, &json!(910)));
    }
}
