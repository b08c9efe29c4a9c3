//! Texts that a report may have: a newtype for text of known forms, and a marker for omitted text.

use crate::commands::doctor::kinds;
use host::{config, nic};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

/// Forms of versions and dates: `#` is a number of up to five digits, everything else is literal.
/// No form has four numbers with dots between them, because that is the form of an IPv4 address.
const VERSIONS: &str = "#.# #.#.# #.#-# #.#-#.#.# #.#.#-# #.#.#-#-nvidia #.#.#-#-nvidia-64k #.#.#-#-generic #.#.#+cuda#.# \
    libibverbs.so.1.#.#.# #.#_#ACUM# #/#/# #-#-#";
/// Names of RDMA devices (by PCI location or by number) and of ports.
const DEVICES: &str =
    "rocep#s# rocep#s#f# rocep#s#f#v# roceP#p#s# roceP#p#s#f# roceP#p#s#f#v# mlx5_# rxe# p#";
/// Names of systems, containers, kernel modules (except the NIC's), IOMMU modes, network plugins,
/// and setting values.
const MACHINES: &str = "ubuntu debian docker podman kubernetes nvidia_peermem rdma_rxe ib_uverbs DMA \
    DMA-FQ identity hpcx no_link excluded unusable default file environment auto on off AF_INET AF_INET6 VERSION WARN \
    INFO TRACE Spark IB Socket none libibverbs.so.1 /sys LL LL128 Simple ^LL128 Ring Tree";
/// Verdicts, severities, grades, limits of rates, effects of variables, fabrics, networks,
/// collectives, and choices of the tuner.
const RESULTS: &str = "good impaired broken slow fragile note fair bad nothing cables pcie honoured ignored unset blocks \
    misleads harms refused nccl soft verbs spark spark-untuned ib socket control broadcast reduce all_gather \
    reduce_scatter all_reduce ring/ll/# ring/ll128/# ring/simple/# tree/ll/# tree/ll128/# tree/simple/#";
const PRODUCTS: &str = "NVIDIA DGX Spark GB10 ASUSTeK GX10 Dell LENOVO ThinkStation PGX HP ZGX MSI EdgeXpert GIGABYTE \
    Acer Veriton H100 H200 A100 L4 L40S RTX HBM3 80GB";
/// Variables whose values are numbers.
const NUMBERS: &str = "NCCL_IB_GID_INDEX NCCL_IB_TC NCCL_IB_SL NCCL_IB_TIMEOUT NCCL_IB_RETRY_CNT \
    NCCL_IB_QPS_PER_CONNECTION NCCL_IB_PCI_RELAXED_ORDERING NCCL_SPARK_CONNECT_TIMEOUT_S NCCL_SPARK_PROBE_TIMEOUT_MS \
    NCCL_SPARK_MIN_SHARE_BYTES NCCL_SPARK_FLOW_LABEL NCCL_SPARK_CPU_LATENCY_US NCCL_SPARK_RING_TCP \
    NCCL_SPARK_STALL_WARN_S NCCL_SPARK_STALL_ABORT_S NCCL_SPARK_LOSS_TIMEOUT_S NCCL_SPARK_LL128 \
    NCCL_SPARK_COUNTERS NCCL_SPARK_VLLM \
    NCCL_IB_DISABLE NCCL_IB_MERGE_NICS NCCL_IB_SUBNET_AWARE_ROUTING NCCL_IB_ROCE_VERSION_NUM NCCL_IB_USE_INLINE \
    NCCL_BUFFSIZE NCCL_NTHREADS NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MAX_CTAS NCCL_CROSS_NIC \
    NCCL_NVLS_ENABLE NCCL_CUMEM_ENABLE NCCL_CUMEM_HOST_ENABLE NCCL_IGNORE_CPU_AFFINITY NCCL_P2P_DISABLE \
    NCCL_SHM_DISABLE NCCL_NCHANNELS_PER_NET_PEER NCCL_NET_OPTIONAL_RECV_COMPLETION";
/// Variables whose values are not numbers. The plugin reads none of them.
const VARIABLES: &str = "NCCL_NET_PLUGIN NCCL_ALGO NCCL_PROTO NCCL_TOPO_FILE NCCL_GRAPH_FILE NCCL_CONF_FILE NCCL_COMM_ID \
    NCCL_PROXY_CPUSET NCCL_DEBUG_SUBSYS NCCL_DEBUG_FILE NCCL_HOSTID NCCL_PROFILER_PLUGIN";

/// A text of one of the forms above, a setting of the plugin or the id of a finding. Any other text
/// becomes `other`. No form fits an IP or hardware address, a serial number, or a word that an
/// owner chooses.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "String")]
pub(super) struct Name(String);

/// A library's build id or SHA-256 in hexadecimal. Any other text becomes `other`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(from = "String")]
pub(super) struct Digest(String);

/// An omitted value: reads any value, and writes `true`.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(from = "IgnoredAny", into = "bool")]
pub(super) struct LeftOut;

/// A value of a setting: a number if the variable is in [`NUMBERS`], else a word.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Value {
    Number(i64),
    Word(Name),
}

impl Name {
    pub(super) fn new(text: &str) -> Self {
        Self(if is_known(text) { text } else { "other" }.to_owned())
    }

    /// Takes the version at the start of `text`. In custom kernels, the owner's words may follow.
    pub(super) fn version(text: &str) -> Self {
        let ends = text
            .char_indices()
            .filter(|(_, c)| "-+_ ".contains(*c))
            .map(|(at, _)| at)
            .chain([text.len()]);
        let mut starts = ends.rev().filter_map(|end| text.get(..end));
        Self::new(
            starts
                .find(|start| start.contains('.') && is_known(start))
                .unwrap_or_default(),
        )
    }

    /// Takes the words of `text` that are in [`PRODUCTS`].
    pub(super) fn product(text: &str) -> Vec<&'static str> {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric());
        words
            .filter_map(|word| {
                PRODUCTS
                    .split(' ')
                    .find(|known| known.eq_ignore_ascii_case(word))
            })
            .collect()
    }
}

impl Value {
    /// Returns the value of a variable, or `None` for an empty text.
    pub(super) fn new(variable: &str, text: &str) -> Option<Self> {
        let number = text
            .parse()
            .ok()
            .filter(|_| NUMBERS.split(' ').any(|known| known == variable));
        (!text.is_empty()).then(|| number.map_or_else(|| Self::Word(Name::new(text)), Self::Number))
    }
}

fn is_known(text: &str) -> bool {
    // The name of a rail is a device and its port number.
    let (name, port) = text.split_once(':').unwrap_or((text, "1"));
    let forms = [
        VERSIONS, DEVICES, MACHINES, RESULTS, PRODUCTS, NUMBERS, VARIABLES,
    ];
    let mut forms = forms
        .into_iter()
        .flat_map(|forms| forms.split(' '))
        .chain(nic::BOARD_ID_FORMS)
        .chain([nic::CORE_MODULE, nic::RDMA_MODULE])
        .chain(nic::counter_forms());
    let mut own = kinds()
        .map(|kind| kind.id)
        .chain(config::table().iter().map(|row| row.name));
    has_form("#", port) && forms.any(|form| has_form(form, name)) || own.any(|known| known == text)
}

pub(super) fn is_counter(name: &str) -> bool {
    nic::counter_forms().any(|form| has_form(form, name))
}

fn has_form(form: &str, text: &str) -> bool {
    const MOST_DIGITS: usize = 5;
    let mut rest = text.as_bytes();
    for part in form.bytes() {
        let length = match part {
            b'#' => rest
                .iter()
                .take(MOST_DIGITS)
                .take_while(|byte| byte.is_ascii_digit())
                .count(),
            literal => usize::from(rest.first() == Some(&literal)),
        };
        if length == 0 {
            return false;
        }
        rest = &rest[length..];
    }
    rest.is_empty()
}

impl From<String> for Name {
    fn from(text: String) -> Self {
        Self::new(&text)
    }
}

impl From<String> for Digest {
    fn from(text: String) -> Self {
        let is_hexadecimal = text
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        Self(if is_hexadecimal && matches!(text.len(), 40 | 64) {
            text
        } else {
            "other".to_owned()
        })
    }
}

impl From<IgnoredAny> for LeftOut {
    fn from(_: IgnoredAny) -> Self {
        Self
    }
}

impl From<LeftOut> for bool {
    fn from(_: LeftOut) -> Self {
        true
    }
}
