//! Parsing of PCI addresses in every spelling.

use gpupool_core::PciAddress;

/// Parses `01:00.0`, `0000:01:00.0`, `00000000:01:00.0` or `10000:E1:00.0`, in either case.
///
/// The function may be missing, as in `0000:01:00`; it is then 0.
pub fn parse_pci_address(text: &str) -> Option<PciAddress> {
    let (rest, function) = match text.trim().rsplit_once('.') {
        Some((rest, function)) => (rest, parse_hex(function, 1)? as u8),
        None => (text.trim(), 0),
    };
    let mut parts = rest.rsplit(':');
    let device = parse_hex(parts.next()?, 2)? as u8;
    let bus = parse_hex(parts.next()?, 2)? as u8;
    let domain = parts.next().map_or(Some(0), |domain| parse_hex(domain, 8))?;
    let is_valid = parts.next().is_none() && device < 32 && function < 8;
    is_valid.then_some(PciAddress { domain, bus, device, function })
}

/// Converts KFD's `location_id` (bus, device and function in one number) and `domain` to an address.
pub(crate) const fn from_kfd_location(domain: u32, location: u32) -> PciAddress {
    PciAddress {
        domain,
        bus: (location >> 8) as u8,
        device: ((location >> 3) & 0x1f) as u8,
        function: (location & 0x7) as u8,
    }
}

fn parse_hex(digits: &str, most: usize) -> Option<u32> {
    let is_hex = !digits.is_empty() && digits.len() <= most && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_hex { u32::from_str_radix(digits, 16).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_spellings_of_one_address_are_equal() {
        let address = PciAddress { domain: 0, bus: 0xc1, device: 0, function: 0 };
        for spelling in ["C1:00.0", "0000:c1:00.0", "00000000:C1:00.0", " 0000:C1:00 "] {
            assert_eq!(parse_pci_address(spelling), Some(address), "{spelling}");
        }
        assert_eq!(parse_pci_address("0000000F:01:00.0").map(|a| a.domain), Some(0xf));
        assert_eq!(parse_pci_address("10000:e1:00.0").map(|a| a.domain), Some(0x10000));
        for wrong in ["", ":", "1", "0000:01:00.9", "0000:01:20.0", "x1:00.0", "1:0:0:0.0", "000000000:01:00.0"] {
            assert_eq!(parse_pci_address(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_kfd_location_contains_bus_device_and_function() {
        assert_eq!(from_kfd_location(1, 0xc1 << 8 | 3 << 3 | 2).to_string(), "0001:c1:03.2");
    }
}
