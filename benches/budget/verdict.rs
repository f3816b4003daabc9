//! Measured figures beside their bounds.

use std::fmt;

/// The bound of a figure.
#[derive(Clone, Copy, Debug)]
pub enum Bound {
    AtMost(f64),
    AtLeast(f64),
    Within(f64, f64),
}

use Bound::{AtLeast, AtMost, Within};

impl Bound {
    fn holds(self, seen: f64) -> bool {
        match self {
            AtMost(most) => seen <= most,
            AtLeast(least) => seen >= least,
            Within(least, most) => (least..=most).contains(&seen),
        }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AtMost(most) => write!(to, "at most {most}"),
            AtLeast(least) => write!(to, "at least {least}"),
            Within(least, most) => write!(to, "{least} to {most}"),
        }
    }
}

/// One row of the report.
struct Row {
    item: u8,
    what: String,
    seen: f64,
    bound: Bound,
}

/// The report.
#[derive(Default)]
pub struct Verdicts(Vec<Row>);

impl Verdicts {
    pub fn add(&mut self, item: u8, what: impl Into<String>, seen: f64, bound: Bound) {
        let row = Row {
            item,
            what: what.into(),
            seen,
            bound,
        };
        println!("{row}");
        self.0.push(row);
    }

    /// Prints the whole report once more.
    pub fn print(&self) {
        println!(
            "\nitem  what                                                                  seen  bound"
        );
        self.0.iter().for_each(|row| println!("{row}"));
        let missed = self
            .0
            .iter()
            .filter(|row| !row.bound.holds(row.seen))
            .count();
        println!("{} figures, {missed} outside of their bounds", self.0.len());
    }
}

impl fmt::Display for Row {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = if self.bound.holds(self.seen) {
            ""
        } else {
            "  MISSED"
        };
        let seen = match self.seen {
            seen if seen == seen.trunc() => format!("{seen:.0}"),
            seen if seen.abs() < 0.1 => format!("{seen:.4}"),
            seen => format!("{seen:.2}"),
        };
        let Row {
            item, what, bound, ..
        } = self;
        write!(to, "{item:>4}  {what:<62} {seen:>11}  {bound}{word}")
    }
}
