//! Parses Prometheus text by name and labels.

use std::collections::BTreeMap;

/// One sample: name, labels and value.
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

/// The content of a `/metrics` page.
pub struct Metrics {
    samples: Vec<Sample>,
    /// The declared type of each family.
    pub types: BTreeMap<String, String>,
    /// The families with a help text.
    pub helped: Vec<String>,
}

impl Metrics {
    /// Parses a page; fails the test on a line that is not Prometheus text.
    pub fn parse(text: &str) -> Metrics {
        let mut metrics = Metrics {
            samples: Vec::new(),
            types: BTreeMap::new(),
            helped: Vec::new(),
        };
        for line in text.lines().filter(|line| !line.is_empty()) {
            if let Some(declared) = line.strip_prefix("# TYPE ") {
                let (name, kind) = declared
                    .split_once(' ')
                    .unwrap_or_else(|| panic!("metrics line {line:?}"));
                metrics.types.insert(name.to_owned(), kind.to_owned());
            } else if let Some(help) = line.strip_prefix("# HELP ") {
                metrics
                    .helped
                    .push(help.split(' ').next().unwrap_or_default().to_owned());
            } else if !line.starts_with('#') {
                let (series, value) = line
                    .rsplit_once(' ')
                    .unwrap_or_else(|| panic!("metrics line {line:?}"));
                let (name, labels) = parse_selector(series);
                let value = value
                    .parse()
                    .unwrap_or_else(|_| panic!("metrics line {line:?}"));
                metrics.samples.push(Sample {
                    name,
                    labels,
                    value,
                });
            }
        }
        metrics
    }

    /// The sum of all series with this name and at least these labels. Fails if there is none.
    pub fn sum(&self, selector: &str) -> f64 {
        let values = self.select(selector);
        assert!(
            !values.is_empty(),
            "no series {selector}; there are:\n{}",
            self.names().join("\n")
        );
        values.iter().sum()
    }

    /// The values of all series with this name and at least these labels.
    pub fn select(&self, selector: &str) -> Vec<f64> {
        let (name, labels) = parse_selector(selector);
        let matches = |sample: &&Sample| {
            sample.name == name
                && labels
                    .iter()
                    .all(|(key, value)| sample.labels.get(key) == Some(value))
        };
        self.samples
            .iter()
            .filter(matches)
            .map(|sample| sample.value)
            .collect()
    }

    /// Every series, for error messages.
    pub fn names(&self) -> Vec<String> {
        self.samples
            .iter()
            .map(|sample| format!("{}{:?}", sample.name, sample.labels))
            .collect()
    }
}

/// Parses `name{a="b",c="d"}`. Values must not contain quotes, commas or braces.
fn parse_selector(text: &str) -> (String, BTreeMap<String, String>) {
    let Some((name, labels)) = text.split_once('{') else {
        return (text.to_owned(), BTreeMap::new());
    };
    let labels = labels.trim_end_matches('}').trim_end_matches(',');
    let pairs = labels
        .split("\",")
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let (key, value) = pair
                .split_once("=\"")
                .unwrap_or_else(|| panic!("label {pair:?} in {text:?}"));
            (
                key.trim().to_owned(),
                value.trim_end_matches('"').to_owned(),
            )
        });
    (name.to_owned(), pairs.collect())
}
