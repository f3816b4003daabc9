//! Parsed metric values for the pages that show them: exactly the series of a scrape.

use super::Metrics;

/// One series at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The metric's name, with the suffix of a histogram's part.
    pub name: String,
    /// Labels in text order.
    pub labels: Vec<(String, String)>,
    /// Its value.
    pub value: f64,
}

impl Sample {
    /// The value of a label; empty if there is none.
    pub fn label(&self, name: &str) -> &str {
        let label = self.labels.iter().find(|(known, _)| known == name);
        label.map_or("", |(_, value)| value)
    }
}

impl Metrics {
    /// Every series. Costs as much as a scrape.
    pub fn samples(&self) -> Vec<Sample> {
        self.render().lines().filter_map(parse).collect()
    }
}

/// Parses a line of the Prometheus text format as this process writes it; `None` for comments.
fn parse(line: &str) -> Option<Sample> {
    if line.starts_with('#') {
        return None;
    }
    let (series, value) = line.rsplit_once(' ')?;
    let (name, mut rest) = match series.split_once('{') {
        Some((name, labels)) => (name, labels),
        None => (series, ""),
    };
    let mut labels = Vec::new();
    while let Some((label, after)) = rest.split_once("=\"") {
        let mut text = String::new();
        let mut chars = after.char_indices();
        let end = loop {
            match chars.next()? {
                (at, '"') => break at,
                (_, '\\') => match chars.next()?.1 {
                    'n' => text.push('\n'),
                    other => text.push(other),
                },
                (_, other) => text.push(other),
            }
        };
        labels.push((label.trim_start_matches(',').to_owned(), text));
        rest = &after[end + 1..];
    }
    Some(Sample {
        name: name.to_owned(),
        labels,
        value: value.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_name_its_labels_and_a_value() {
        let line = r#"a_total{route="all, \"of\" \\ them}",code="200"} 3"#;
        let sample = parse(line).expect("a sample");
        assert_eq!((&*sample.name, sample.value), ("a_total", 3.0));
        assert_eq!(sample.label("route"), r#"all, "of" \ them}"#);
        assert_eq!((sample.label("code"), sample.label("other")), ("200", ""));
        assert_eq!(parse("b 1.5").map(|sample| sample.value), Some(1.5));
        assert_eq!(parse("# HELP b what"), None);
    }

    #[test]
    fn what_is_counted_is_read_back() {
        let metrics = Metrics::install();
        metrics.decisions("all", "a").rejected.increment(7);
        let samples = metrics.samples();
        let rejected = samples.iter().find(|sample| {
            sample.name == "tidegate_decisions_total" && sample.label("outcome") == "rejected"
        });
        assert_eq!(rejected.map(|sample| sample.value), Some(7.0));
    }
}
