#include "fulgur/reports/html_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fulgur/reports/run_folder.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

RunFolder run_of(const std::string& name, const std::string& metrics) {
  RunFolder run{.name = name};
  run.metrics = parse_metric_table(metrics, name);
  return run;
}

std::string report_of(const std::vector<RunFolder>& runs) { return html_report(runs); }

TEST(HtmlReport, FiguresAreThoseOfTheMetrics) {
  const std::string page = report_of({run_of("a", "epoch,step,loss\n0,0,0.123456789\n0,1,3\n0,2,1e-12\n")});
  EXPECT_THAT(page,
              HasSubstr("<td>0.123456789<br>at 0</td><td>1e-12<br>at 2</td><td>1e-12<br>at 2</td><td>3<br>at 1</td>"));
}

TEST(HtmlReport, NoTextOfARunIsMarkup) {
  const std::string evil = "</script><b a=\"'>&";
  RunFolder run = run_of(evil, "epoch,step,\"</script><b a=\"\"'>&,\"\n0,0,1\n");
  run.config = {{evil, evil}};
  run.environment = {{evil, evil}};
  run.checkpoints = {{.name = evil, .monitor = evil, .score = 1.0}};
  run.notes = {evil};
  const std::string page = report_of({run, run});
  EXPECT_THAT(page, Not(HasSubstr("</script>")));
  EXPECT_THAT(page, Not(HasSubstr("<b a")));
  EXPECT_THAT(page, HasSubstr("&lt;/script&gt;&lt;b a=&quot;&#39;&gt;&amp;,"));
}

TEST(HtmlReport, ThePageNeedsNoNetworkAndNoScript) {
  const std::string page = report_of({run_of("a", "epoch,step,loss\n0,0,1\n")});
  for (const char* part : {"<script", "http:", "https:", "src=", "@import", "url("})
    EXPECT_THAT(page, Not(HasSubstr(part)));
}

TEST(HtmlReport, OptionsThatDifferComeFirst) {
  RunFolder a = run_of("a", "epoch,step\n"), b = run_of("b", "epoch,step\n");
  a.config = {{"lr", "0.1"}, {"seed", "1"}, {"width", "8"}};
  b.config = {{"lr", "0.2"}, {"seed", "1"}};
  const std::string page = report_of({a, b});
  const std::string differing =
      page.substr(page.find("What differs"), page.find("<details>") - page.find("What differs"));
  EXPECT_THAT(differing, HasSubstr("<td>lr</td><td>0.1</td><td>0.2</td>"));
  EXPECT_THAT(differing, HasSubstr("<td>width</td><td>8</td><td><span class=\"note\">not set</span></td>"));
  EXPECT_THAT(differing, Not(HasSubstr("seed")));
  EXPECT_THAT(page, HasSubstr("All 3 options"));
  EXPECT_THAT(report_of({b, b}), HasSubstr("All options are the same."));
  EXPECT_THAT(report_of({b}), Not(HasSubstr("What differs")));
}

TEST(HtmlReport, RunsWithoutAMetricInCommonHaveAChartEach) {
  const std::string page = report_of({run_of("a", "epoch,step,x\n0,0,1\n"), run_of("b", "epoch,step,y\n0,0,1\n")});
  EXPECT_THAT(page, HasSubstr("<h3>x</h3>"));
  EXPECT_THAT(page, HasSubstr("<h3>y</h3>"));
}

TEST(HtmlReport, AMetricThatIsNeverFiniteSaysSo) {
  const std::string page = report_of({run_of("a", "epoch,step,loss\n0,0,nan\n0,1,nan\n")});
  EXPECT_THAT(page, HasSubstr("2 of 2 values are not finite"));
  EXPECT_THAT(page, HasSubstr("<td>nan<br>at 0</td><td>nan<br>at 1</td><td>-</td><td>-</td>"));
}

TEST(HtmlReport, MemoryAndProfilesAreShownAsTheyWereWritten) {
  RunFolder run = run_of("a", "epoch,step,loss\n0,0,1\n");
  run.environment = {{"host", "here"}, {"memory_of_strategy", "parameters  1 <MB>\n"}};
  run.profiles = {{"profile-fit.txt", "forward  90%\n"}};
  const std::string page = report_of({run});
  EXPECT_THAT(page, HasSubstr("<h2>Memory by strategy</h2>"));
  EXPECT_THAT(page, HasSubstr("<pre>parameters  1 &lt;MB&gt;\n</pre>"));
  EXPECT_THAT(page, HasSubstr("profile-fit.txt</h3>\n<pre>forward  90%\n</pre>"));
  EXPECT_THAT(page, Not(HasSubstr("memory_of_strategy")));
  run.environment = {{"memory_of_strategy", ""}};  // not known
  run.profiles = {};
  EXPECT_THAT(report_of({run}), Not(HasSubstr("<pre>")));
}

TEST(HtmlReport, WithoutMetricsItSaysSo) {
  RunFolder run{.name = "a"};
  run.notes = {"there is no metrics.csv: none is written yet, or CSVLogger's file is elsewhere"};
  const std::string page = report_of({run});
  EXPECT_THAT(page, HasSubstr("No metrics have been logged."));
  EXPECT_THAT(page, HasSubstr("there is no metrics.csv"));
}

}  // namespace
}  // namespace fulgur
