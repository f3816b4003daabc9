//! The path vectors: each path has its listed forwarded form and match key, or is rejected.

use serde_json::Value;
use tidegate::route::path::normalise_target;

const VECTORS: &str = include_str!("../vectors/http_vectors.json");

/// The forwarded target and the match key, or `None` for 400.
fn normalised(target: &str) -> Option<(String, String)> {
    let normal = normalise_target(target).ok()?;
    let query = normal
        .query
        .map(|query| format!("?{query}"))
        .unwrap_or_default();
    Some((
        format!("{}{query}", normal.path.forward),
        normal.path.key.into_owned(),
    ))
}

#[test]
fn every_path_vector_is_forwarded_and_matched_as_listed() {
    let vectors: Value = serde_json::from_str(VECTORS).expect("the vectors are JSON");
    let (mut accepted, mut refused) = (0, 0);
    for vector in vectors["path"].as_array().expect("a list of paths") {
        let text = |name: &str| vector[name].as_str().map(str::to_owned);
        let target = text("target").expect("a target");
        let expected = text("forward").zip(text("key"));
        assert_eq!(normalised(&target), expected, "{target}: {}", vector["why"]);
        match expected {
            Some(_) => accepted += 1,
            None => refused += 1,
        }
    }
    assert_eq!(
        (accepted, refused),
        (26, 23),
        "accepted and refused paths of the vectors"
    );
}
