//! Reads networks, such as `10.0.0.0/8`.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::config::{
    code::Code,
    diagnostic::{PendingDiagnostic, quote},
    expanded_text::ExpandedText,
};

pub(super) fn networks(written: &[ExpandedText<'_>]) -> Vec<IpNet> {
    let network = |text: &ExpandedText<'_>| {
        let network = text.parse("a network", parse_network)?;
        if trusts_everybody(&network) {
            let message = format!("{} trusts every address as a proxy", text.shown());
            let hint = "any client can then choose the address that limits count by: list your proxies' networks";
            text.warn(PendingDiagnostic::new(Code::TrustsEverybody, message).hint(hint));
        }
        Some(network)
    };
    written.iter().filter_map(network).collect()
}

/// Whether the network is a whole address family. IPv4 has a second, mapped form (RFC 4291
/// §2.5.5.2).
fn trusts_everybody(network: &IpNet) -> bool {
    network.prefix_len() == 0 || network.to_string() == "::ffff:0.0.0.0/96"
}

/// Parses a network; a single address is a network of one.
pub(super) fn parse_network(text: &str) -> Result<IpNet, PendingDiagnostic> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(IpNet::from(address));
    }
    let bad = |message| PendingDiagnostic::new(Code::BadAddress, message);
    let network: IpNet = text.parse().map_err(|_| {
        bad(format!("{} is not a network", quote(text)))
            .hint("write an address and a prefix, such as \"10.0.0.0/8\" or \"fd00::/8\"")
    })?;
    if network.trunc() != network {
        let message = format!("{} has bits beyond its prefix", quote(text));
        let hint = format!(
            "write \"{}\" for the network, \"{}\" for the one address",
            network.trunc(),
            network.addr()
        );
        return Err(bad(message).hint(hint));
    }
    Ok(network)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_may_be_one_address_but_has_no_stray_bits() {
        let network = |text| {
            parse_network(text)
                .map(|network| network.to_string())
                .map_err(|problem| problem.hint)
        };
        assert_eq!(network("10.0.0.0/8"), Ok("10.0.0.0/8".to_owned()));
        assert_eq!(network("10.1.2.3"), Ok("10.1.2.3/32".to_owned()));
        assert_eq!(network("::1"), Ok("::1/128".to_owned()));
        let hint = "write \"10.0.0.0/8\" for the network, \"10.1.2.3\" for the one address";
        assert_eq!(network("10.1.2.3/8"), Err(hint.to_owned()));
        assert!(network("10.0.0.0/33").is_err());
        assert!(network("everywhere").is_err());
    }
}
