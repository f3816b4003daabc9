//! Reduces a history to the records that show a fault.

use super::{Fault, Record, Rule, judge_admitted};

/// The records that matter for a fault, sorted by start.
///
/// A history without some of its requests is still true, so requests are dropped as long as the
/// excess remains. Wrong rejections are different: without an admitted request the limit looks less
/// spent than it was. For them, only other rejections and records that are too old to matter are
/// dropped.
pub fn shrink(rule: &Rule, history: &[Record], fault: &Fault) -> Vec<Record> {
    let mut kept = match fault {
        Fault::Beyond { requests, from, .. } => {
            let since = from - rule.memory();
            let inside = requests.iter().map(|&index| history[index]);
            let before = history
                .iter()
                .filter(|record| record.charged() && record.end >= since && record.end < *from);
            drop_while_beyond(rule, before.copied().chain(inside).collect())
        }
        Fault::WronglyRefused { request, .. } | Fault::TooLate { request, .. } => {
            around(rule, history, &[*request])
        }
        Fault::Forgotten { .. } => history.to_vec(),
        Fault::TooEarly { refused, again } => around(rule, history, &[*refused, *again]),
    };
    kept.sort_unstable_by_key(|record| record.start);
    kept
}

fn drop_while_beyond(rule: &Rule, mut history: Vec<Record>) -> Vec<Record> {
    let is_beyond = |history: &[Record]| !judge_admitted(rule, history).is_empty();
    let mut size = history.len().div_ceil(2);
    while size > 0 {
        let mut at = 0;
        while at < history.len() {
            let end = (at + size).min(history.len());
            let rest = [&history[..at], &history[end..]].concat();
            if is_beyond(&rest) {
                history = rest;
            } else {
                at = end;
            }
        }
        size /= 2;
    }
    history
}

fn around(rule: &Rule, history: &[Record], requests: &[usize]) -> Vec<Record> {
    let spans = requests.iter().map(|&index| &history[index]);
    let (mut from, mut to) = (i64::MAX, i64::MIN);
    for record in spans {
        from = from.min(record.start - rule.memory());
        to = to.max(record.end);
    }
    let matters = |index: &usize| {
        let record = &history[*index];
        let charged = record.charged() || record.verdict == super::Verdict::Neither;
        requests.contains(index) || charged && record.end >= from && record.start <= to
    };
    let kept = (0..history.len()).filter(matters);
    kept.map(|index| history[index]).collect()
}

/// Formats the history; omits lines in the middle if there are many.
pub fn lines(history: &[Record]) -> String {
    const MOST: usize = 40;
    let mut text = String::new();
    for (index, record) in history.iter().enumerate() {
        let from_end = history.len() - index;
        if history.len() <= MOST || index < MOST / 2 || from_end <= MOST / 2 {
            text += &format!("  {record}\n");
        } else if index == MOST / 2 {
            text += &format!("  … {} more\n", history.len() - MOST);
        }
    }
    text
}
