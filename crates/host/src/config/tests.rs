//! Tests of the settings: sources of values, and refused values.

use super::*;
use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, chown};

fn read(pairs: &[(&str, &str)]) -> Result<Config> {
    let variables: Vec<_> = pairs
        .iter()
        .map(|(n, v)| ((*n).to_owned(), (*v).to_owned()))
        .collect();
    Config::from_variables(&variables)
}

#[test]
fn every_default_parses_and_empty_is_unset() {
    let config = read(&[]).unwrap();
    assert_eq!(config.rails.verbs_library, "libibverbs.so.1");
    assert_eq!(
        (
            config.rails.gid_index,
            config.qp.timeout,
            config.qp.retry_count
        ),
        (None, 14, 6)
    );
    let emptied: Vec<_> = table().iter().map(|row| (row.name, "")).collect();
    let config = read(&emptied).unwrap();
    assert_eq!(config.qp.timeout, 14);
    assert_eq!(
        (config.setup.traffic_class, config.setup.qps_per_rail),
        (None, None)
    );
}

struct Written(tempfile::TempDir);

impl Written {
    fn new(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("spark.conf"), text).unwrap();
        Self(folder)
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("spark.conf")
    }
}

fn gather(pairs: &[(&str, &str)], standard: &[PathBuf]) -> Result<Settings> {
    let variables: Vec<_> = pairs
        .iter()
        .map(|(n, v)| ((*n).to_owned(), (*v).to_owned()))
        .collect();
    Settings::gather(&variables, standard)
}

#[test]
fn the_environment_wins_over_the_users_file_and_that_over_the_machines() {
    let user = Written::new("NCCL_IB_TC=1\nNCCL_IB_SL=2\nNCCL_IB_TIMEOUT=\n");
    let machine = Written::new("# all\nNCCL_IB_SL=3\nNCCL_IB_RETRY_CNT=4\n");
    let standard = [
        user.path(),
        machine.path(),
        user.path().with_file_name("none"),
    ];
    let environment = [("NCCL_IB_TC", "5"), ("NCCL_IB_RETRY_CNT", " ")];
    let settings = gather(&environment, &standard).unwrap();
    let Config { setup, qp, .. } = &settings.config;
    let SetupConfig {
        traffic_class,
        service_level,
        ..
    } = *setup;
    let QpConfig {
        timeout,
        retry_count,
        ..
    } = *qp;
    assert_eq!(
        (traffic_class, service_level, retry_count, timeout),
        (Some(5), Some(2), 4, 14)
    );
    let source = |name: &str| {
        settings
            .in_effect()
            .iter()
            .find(|one| one.row.name == name)
            .unwrap()
            .source
            .clone()
    };
    assert_eq!(source("NCCL_IB_TC"), Source::Environment);
    assert_eq!(
        source("NCCL_IB_SL"),
        Source::File {
            path: user.path(),
            line: 2
        }
    );
    assert_eq!(
        source("NCCL_IB_RETRY_CNT"),
        Source::File {
            path: machine.path(),
            line: 3
        }
    );
    assert_eq!(source("NCCL_IB_TIMEOUT"), Source::Default);
    let told = [
        (user.path(), "NCCL_IB_SL=2"),
        (machine.path(), "NCCL_IB_RETRY_CNT=4"),
    ];
    let told = told.map(|(path, what)| format!("settings from {}: {what}", path.display()));
    assert_eq!(settings.from_files(), told);
}

#[test]
fn variables_of_nccls_own_transports_are_named_where_they_are_set() {
    let environment = [
        ("NCCL_IB_DISABLE", "0"),
        ("NCCL_IB_PKEY", " "),
        ("NCCL_CROSS_NIC", "1"),
        ("NCCL_IB_TC", "-1"),
    ];
    let line = gather(&environment, &[]).unwrap().ignored().unwrap();
    assert_eq!(
        line,
        "not used by this plugin: NCCL_IB_DISABLE, NCCL_CROSS_NIC; `nccl-spark doctor --env` says why"
    );
    assert_eq!(gather(&[("NCCL_IB_TC", "7")], &[]).unwrap().ignored(), None);
}

#[test]
fn a_settings_file_named_by_a_variable_replaces_the_standard_ones() {
    let standard = Written::new("NCCL_IB_TC=1\n");
    let named = Written::new("NCCL_IB_SL=2\n");
    let variable = |path: &str| gather(&[("NCCL_SPARK_SETTINGS_FILE", path)], &[standard.path()]);
    let setup = variable(named.path().to_str().unwrap())
        .unwrap()
        .config
        .setup;
    assert_eq!((setup.traffic_class, setup.service_level), (None, Some(2)));
    let none = variable("/dev/null").unwrap();
    assert_eq!(
        (
            none.config.setup.traffic_class,
            none.config.setup.service_level
        ),
        (None, None)
    );
    assert_eq!(
        none.from_files(),
        ["settings from /dev/null: no setting in effect"]
    );
    assert_eq!(variable("").unwrap().config.setup.traffic_class, Some(1));
    let gone = named.path().with_file_name("gone");
    let error = variable(gone.to_str().unwrap()).unwrap_err().to_string();
    assert!(
        error.starts_with("NCCL_SPARK_SETTINGS_FILE=") && error.contains("gone"),
        "{error}"
    );
    let named = [(
        "NCCL_SPARK_SETTINGS_FILE".to_owned(),
        named.path().to_str().unwrap().to_owned(),
    )];
    assert_eq!(
        Config::from_variables(&named).unwrap().setup.service_level,
        Some(2)
    );
}

#[test]
fn a_file_that_another_user_can_change_names_no_library() {
    let file = Written::new("NCCL_IB_TC=1\nNCCL_IBVERBS_LIB=/tmp/evil.so\n");
    let gather = || gather(&[], &[file.path()]).map(|settings| settings.config.rails.verbs_library);
    let set_mode =
        |mode| std::fs::set_permissions(file.path(), Permissions::from_mode(mode)).unwrap();
    let refused = |because: &str| {
        let error = gather().unwrap_err().to_string();
        let place = format!("{}, line 2: NCCL_IBVERBS_LIB=", file.path().display());
        assert!(
            error.starts_with(&place) && error.contains(because),
            "{error}"
        );
    };
    // Files of a user with an own group have this mode.
    set_mode(0o664);
    assert_eq!(gather().unwrap(), "/tmp/evil.so");
    set_mode(0o646);
    refused("this file has mode 0646");
    if nix::unistd::geteuid().is_root() {
        set_mode(0o664);
        chown(file.path(), None, Some(65534)).unwrap();
        refused("this file has mode 0664");
        chown(file.path(), Some(65534), Some(0)).unwrap();
        refused("this file belongs to uid 65534");
        // Such a file may have other settings.
        std::fs::write(file.path(), "NCCL_IB_TC=1\n").unwrap();
        assert_eq!(gather().unwrap(), "libibverbs.so.1");
    }
}

#[test]
fn values_from_a_file_are_checked_and_errors_name_file_and_line() {
    for (line, allowed) in [
        ("NCCL_IB_TC=256", "else 0) to 255"),
        (
            "NCCL_SPARK_MIN_SHARE=1",
            "did you mean NCCL_SPARK_MIN_SHARE_BYTES?",
        ),
        (
            "NCCL_ALGO=Ring",
            "no such setting; `nccl-spark settings` lists all",
        ),
        ("NCCL_IB_TIMOEUT=18", "did you mean NCCL_IB_TIMEOUT?"),
        (
            "NCCL_SPARK_SETTINGS_FILE=/etc/other.conf",
            "cannot name another",
        ),
        ("NCCL_IB_TC", "NAME=value"),
    ] {
        let file = Written::new(&format!("\n{line}\n"));
        let error = gather(&[("NCCL_IB_TC", "7")], &[file.path()])
            .unwrap_err()
            .to_string();
        let place = format!("{}, line 2: ", file.path().display());
        assert!(
            error.starts_with(&place) && error.contains(allowed),
            "{line}: {error}"
        );
    }
}

#[test]
fn settings_files_are_read_from_the_documented_places() {
    let files = standard_files();
    assert_eq!(
        files.last().unwrap(),
        &PathBuf::from("/etc/nccl-spark.conf")
    );
    assert!(
        files.len() == 1 || files[0].ends_with(".nccl-spark.conf"),
        "{files:?}"
    );
    let row = table()
        .iter()
        .find(|row| row.name == SETTINGS_FILE)
        .unwrap();
    assert!(row.doc.contains("`~/.nccl-spark.conf`") && row.doc.contains("`/etc/nccl-spark.conf`"));
}

#[test]
fn a_setting_out_of_range_is_named_with_what_is_allowed() {
    for (name, value) in [
        ("NCCL_IB_TC", "256"),
        ("NCCL_IB_TC", "-2"),
        ("NCCL_IB_TIMEOUT", "0"),
        ("NCCL_IB_RETRY_CNT", "8"),
        ("NCCL_IB_GID_INDEX", "-2"),
        ("NCCL_IB_GID_INDEX", "256"),
        ("NCCL_IB_QPS_PER_CONNECTION", "17"),
        ("NCCL_SOCKET_FAMILY", "ipv4"),
        ("NCCL_SPARK_CONNECT_TIMEOUT_S", "soon"),
        ("NCCL_IB_HCA", "mlx5_0:x"),
        ("NCCL_IB_HCA", "^="),
        ("NCCL_IB_HCA", "mlx5 0"),
        ("NCCL_SPARK_TUNER", "yes"),
        ("NCCL_SPARK_TUNER_TABLE", "for=*;all_reduce@2:1-2=ring/ll/0"),
        ("NCCL_SPARK_LL128", "2"),
        ("NCCL_SPARK_CPU_LATENCY_US", "-1"),
        ("NCCL_SPARK_CPU_LATENCY_US", "1000001"),
    ] {
        let error = read(&[(name, value)]).unwrap_err().to_string();
        let row = table().iter().find(|row| row.name == name).unwrap();
        assert!(error.contains(name) && error.contains(value), "{error}");
        let told = error.split_once(" is not usable: ").unwrap().1;
        let allowed = told.rsplit("; allowed: ").next().unwrap();
        assert!(row.doc.ends_with(allowed), "{error}");
    }
}

#[test]
fn a_value_with_parts_is_refused_with_the_part_and_the_reason_however_long_it_is() {
    let good: Vec<String> = (0..200)
        .map(|n| format!("all_reduce@2:{}-{}=ring/ll/1", n * 10, n * 10 + 9))
        .collect();
    let table = |row: &str| format!("for=*;{};{row};all_gather@2:1-2=ring/ll/1", good.join(";"));
    let bad = "all_reduce@2:9000-9001=ring/ll/0";
    let long = "x".repeat(5000);
    for (name, value, reason) in [
        (
            "NCCL_SPARK_TUNER_TABLE",
            table(bad),
            format!("row {bad}: channels must be 1 to 64"),
        ),
        (
            "NCCL_SPARK_TUNER_TABLE",
            table("all_reduce@2:9=ring"),
            "row 201 (\"all_reduce@2:9=ring\"): not a row".into(),
        ),
        (
            "NCCL_SPARK_TUNER_TABLE",
            table(&long),
            format!("row 201 (\"{}\"...): not a row", &long[..60]),
        ),
        (
            "NCCL_IB_HCA",
            "mlx5_0,mlx5_1:x".into(),
            "the port must be 1 to 255 in \"mlx5_1:x\"".into(),
        ),
        (
            "NCCL_IB_HCA",
            vec!["a"; 33].join(","),
            "it has 33 names".into(),
        ),
        (
            "NCCL_IB_HCA",
            format!("a b{long}"),
            "no device or interface can have the name".into(),
        ),
    ] {
        let error = read(&[(name, &value)]).unwrap_err().to_string();
        assert!(
            error.starts_with(name) && error.contains(&reason),
            "{error}"
        );
        assert!(
            error.contains("; allowed: ") && error.len() < 600,
            "{} bytes: {error}",
            error.len()
        );
    }
    let file = Written::new(&format!("\nNCCL_SPARK_TUNER_TABLE={}\n", table(bad)));
    let error = gather(&[], &[file.path()]).unwrap_err().to_string();
    assert!(
        error.contains(", line 2: NCCL_SPARK_TUNER_TABLE=") && error.contains("channels must be"),
        "{error}"
    );
}

#[test]
fn an_unknown_spark_variable_is_an_error_and_other_variables_are_ignored() {
    let error = read(&[("NCCL_SPARK_CONECT_TIMEOUT_S", "3")])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("NCCL_SPARK_CONECT_TIMEOUT_S")
            && error.contains("NCCL_SPARK_CONNECT_TIMEOUT_S"),
        "{error}"
    );
    read(&[
        ("NCCL_ALGO", "Ring"),
        ("PATH", "/bin"),
        ("NCCL_IB_SPLIT_DATA_ON_QPS", "1"),
    ])
    .unwrap();
}

#[test]
fn a_removed_setting_is_ignored_with_a_warning_in_the_environment_and_in_a_file() {
    let file = Written::new("\nNCCL_SPARK_INFLIGHT_BYTES=1\nNCCL_IB_TC=7\n");
    let settings = gather(&[("NCCL_SPARK_INFLIGHT_BYTES", "5")], &[file.path()]).unwrap();
    let line = format!(
        "{}, line 2: NCCL_SPARK_INFLIGHT_BYTES",
        file.path().display()
    );
    let warnings = ["NCCL_SPARK_INFLIGHT_BYTES", &line]
        .map(|shown| format!("{shown} has no effect: this version has no such setting"));
    assert_eq!(settings.removed, warnings);
    assert_eq!(settings.config.setup.traffic_class, Some(7));
    assert!(gather(&[], &[]).unwrap().removed.is_empty());
}

/// Names of this plugin's own settings in all versions, without their common prefix.
const EVER: &str = "CONNECT_TIMEOUT_S COUNTERS CPU_LATENCY_US FLOW_LABEL INFLIGHT_BYTES LL128 LOSS_TIMEOUT_S \
                    MIN_SHARE_BYTES PROBE_TIMEOUT_MS RING_TCP SETTINGS_FILE STALL_ABORT_S STALL_WARN_S SYSFS TUNER \
                    TUNER_TABLE VLLM";

#[test]
fn a_setting_may_leave_the_table_only_for_the_list_of_removed_ones() {
    let ever: Vec<String> = EVER
        .split_whitespace()
        .map(|end| format!("{OWN_PREFIX}{end}"))
        .collect();
    for name in &ever {
        let is_in_table = TABLE.iter().any(|row| row.name == name);
        assert!(
            is_in_table != is_removed(name),
            "{name} must be in the table or in REMOVED, and not in both"
        );
    }
    for row in TABLE.iter().filter(|row| row.name.starts_with(OWN_PREFIX)) {
        assert!(
            ever.iter().any(|name| name == row.name),
            "add {} to this test's list",
            row.name
        );
    }
}
