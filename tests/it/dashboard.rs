//! The page at `/` of the admin address in a browser: its content, and its actions.

use std::{env, fs, path::PathBuf};

use base64::{Engine as _, engine::general_purpose::STANDARD};

use crate::support::{Gateway, Request, browser::Browser, wait::eventually_eq};

const LIMITED: &str = r#"
    [gateway]
    limits = ["per_ip", "everybody"]
    [limit.per_ip]
    key = ["ip"]
    rate = "1/h"
    burst = 3
    [limit.everybody]
    key = []
    rate = "1000/s"
"#;

/// Saves a screenshot if TIDEGATE_SCREENSHOTS names a folder.
fn picture(browser: &Browser, name: &str) {
    let png = STANDARD.decode(browser.screenshot()).expect("base64");
    assert!(png.starts_with(b"\x89PNG") && png.len() > 5_000, "{name}");
    if let Some(folder) = env::var_os("TIDEGATE_SCREENSHOTS") {
        fs::write(PathBuf::from(folder).join(name).with_extension("png"), png)
            .expect("the folder is writable");
    }
}

#[test]
fn the_page_shows_who_is_rejected_and_why_and_stops_a_limit_when_told_twice() {
    let gateway = Gateway::with(LIMITED).start();
    gateway.statuses(&Request::get("/cart/%3Cb%3Ex"), 6);
    let browser = Browser::start();
    browser.resize(1280, 1800);
    browser.open(&format!("http://{}/", gateway.admin_address()));
    browser.wait_for(
        "the limits",
        "document.querySelectorAll('#limits tbody tr').length === 2",
    );
    browser.wait_for(
        "the rejections",
        "document.querySelectorAll('#latest tbody tr').length === 3",
    );
    let has = |what: &str, text: &str| {
        browser.wait_for(what, &format!("document.body.innerText.includes({text:?})"));
    };
    has("who is rejected", "ip=127.0.0.1/32");
    browser.wait_for(
        "the lines of the chart",
        "document.querySelector('#line-rejected').getAttribute('points').split(' ').length >= 2",
    );
    has("the state", "ready");
    has("the upstream", "in service");
    has(
        "that there is no Redis",
        "this gateway enforces its limits alone",
    );
    picture(&browser, "wide-light");

    browser.run("document.querySelector('#latest button').click()");
    has("why", "REJECTS");
    browser.run("document.querySelector('#wanted').value = '127.0.0.1'; document.querySelector('#search button').click()");
    has("the bucket", "3 of 3 spent");
    assert_eq!(
        browser.run("return document.querySelector('b > x, main script') === null"),
        true
    );

    for (name, width, scheme) in [
        ("wide-dark", 1280, "dark"),
        ("narrow-dark", 390, "dark"),
        ("narrow-light", 390, "light"),
    ] {
        browser.resize(width, 1800);
        browser.prefer(scheme);
        browser.wait_for(
            "nothing to stand out",
            &format!("document.documentElement.scrollWidth <= {width} && innerWidth === {width}"),
        );
        picture(&browser, name);
    }

    browser.run("document.querySelector('#limits button.danger').click()");
    browser.wait_for("the question", "document.querySelector('#confirm').open");
    picture(&browser, "question");
    browser.run("document.querySelector('#confirm button[value=cancel]').click()");
    assert_eq!(gateway.get("/").status, 429, "nothing has happened");
    browser.run("document.querySelector('#limits button.danger').click()");
    browser.run("document.querySelector('#confirm button[value=yes]').click()");
    eventually_eq("the limit to be off", 200, || gateway.get("/").status);
    browser.wait_for(
        "the page to say so",
        "document.querySelector('#limits .bad')?.textContent === 'off'",
    );
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn the_page_asks_for_the_token_where_there_is_one() {
    let toml = format!("{LIMITED}[admin]\naddress = \"127.0.0.1:0\"\ntoken_file = \"token\"\n");
    let gateway = Gateway::with(&toml)
        .file("token", "a-token-of-sixteen\n")
        .start();
    let browser = Browser::start();
    browser.open(&format!("http://{}/", gateway.admin_address()));
    browser.wait_for("the question", "document.querySelector('#login').open");
    assert_eq!(
        browser.run("return document.querySelectorAll('#limits tbody tr').length"),
        0
    );
    browser.run("document.querySelector('#token').value = 'a-token-of-sixteen'; document.querySelector('#login button').click()");
    browser.wait_for(
        "the limits",
        "document.querySelectorAll('#limits tbody tr').length === 2",
    );
}
